"""Log probabilities of generated tokens, from the kernel's ring to what a caller reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .kernel_args import constant, structs
from .tokenizer import Tokenizer

Place = Literal["thought", "answer", "stop"]


@dataclass(frozen=True)
class StepLogprobs:
    """Of one step: natural logarithm of the chosen token's probability, and of the likeliest tokens', best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TopLogprob:
    """One of the likeliest tokens. bytes: its part of the text's UTF-8, which may be half a character."""

    token_id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token and how likely it was.

    logprob: natural logarithm of its probability in the distribution that top_k, top_p and min_p filter: softmax over the
    whole vocabulary of the logits after penalties, logit_bias and a grammar's mask, divided by the temperature (by 1 for
    greedy generation). 0 for a token that was put in without a choice, as the end of a spent thinking budget is.
    top: the likeliest tokens, best first. place: "thought", "answer" (also white space and tags around it) or "stop" (a stop id).
    """

    token_id: int
    bytes: bytes
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    place: Place = "answer"

    @property
    def text(self) -> str:
        """The token's text; U+FFFD where it is half a character."""
        return self.bytes.decode("utf-8", "replace")


def token_logprob(tokenizer: Tokenizer, token: int, step: StepLogprobs, place: Place) -> TokenLogprob:
    def text(of: int) -> bytes:
        return tokenizer.token_bytes(of, skip_special=False)

    top = tuple(TopLogprob(other, text(other), value) for other, value in step.top)
    return TokenLogprob(token, text(token), step.logprob, top, place)


def ring_bytes() -> int:
    """Bytes of the ring that the kernel writes: an entry for each of the last LILY_HISTORY steps."""
    return structs()["StepLogprobs"].size * constant("LILY_HISTORY")


def read_ring(ring: np.ndarray, step: int) -> StepLogprobs:
    """The entry of a step that has completed. ring: the buffer's bytes."""
    layout = structs()["StepLogprobs"]
    at = step % constant("LILY_HISTORY") * layout.size
    entry = ring[at : at + layout.size]

    def values(name: str, dtype: type) -> np.ndarray:
        field = layout.field(name)
        return entry[field.offset : field.offset + 4 * field.count].view(dtype)

    count = int(values("count", np.uint32)[0])
    top = zip(values("ids", np.uint32)[:count].tolist(), values("values", np.float32)[:count].tolist(), strict=True)
    return StepLogprobs(float(values("value", np.float32)[0]), tuple(top))
