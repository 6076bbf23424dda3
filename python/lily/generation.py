"""From a request's keywords to checked values, and from sampled ids to text."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from .config import ModelConfig
from .errors import RequestError
from .options import ExecutionOptions
from .reasoning import CLOSE, OPEN, ReasoningSplitter, prompt_opens_thought
from .sampling import SamplingParams, with_defaults
from .stop_strings import StopMatcher, normal_stops
from .tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 2048


@dataclass(frozen=True)
class Request:
    """A checked generation request."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stops: tuple[str, ...]
    options: ExecutionOptions
    raw: bool


def build_request(
    config: ModelConfig, prompt_ids: Sequence[int], *, raw: bool, max_tokens: int | None, temperature: float | None, top_p: float | None,
    top_k: int | None, min_p: float | None, seed: int | None, stop: object, options: ExecutionOptions | None,
) -> Request:
    """Checks every keyword; raises RequestError naming the one at fault."""
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise RequestError(f"max_tokens must be a positive integer, got {max_tokens!r}")
    if options is not None and not isinstance(options, ExecutionOptions):
        raise RequestError(f"options must be lily.ExecutionOptions, got {type(options).__name__}")
    ids = token_ids(prompt_ids)
    return Request(
        ids,
        max_tokens or config.generation.max_tokens or DEFAULT_MAX_TOKENS,
        with_defaults(config.generation, temperature, top_p, top_k, min_p, seed),
        normal_stops(stop),
        options or ExecutionOptions(),
        raw,
    )


def token_ids(ids: object) -> tuple[int, ...]:
    """A request's ids as Python integers; RequestError for anything else."""
    try:
        return tuple(_token_id(token) for token in ids)  # type: ignore[attr-defined]
    except TypeError:
        raise RequestError(f"prompt_ids must be a sequence of integers, got {type(ids).__name__}") from None


def _token_id(token: object) -> int:
    """A Python or NumPy integer."""
    if type(token) is int:  # nearly always; the check of a protocol is slow over a long prompt
        return token
    if isinstance(token, SupportsIndex) and not isinstance(token, bool):
        return operator.index(token)
    raise RequestError(f"prompt_ids must be integers, got {token!r}")


class TextAssembler:
    """Sampled ids → reasoning and answer text, piece by piece. Stop strings are looked for in the answer."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stop = StopMatcher(request.stops)
        open_id, close_id = tokenizer.control.get(OPEN), tokenizer.control.get(CLOSE)
        self._splitter: ReasoningSplitter | None = None
        if not request.raw:
            self._splitter = ReasoningSplitter(prompt_opens_thought(request.prompt_ids, open_id, close_id), close_id=close_id)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stop.matched

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.matched is not None

    def push(self, token: int) -> tuple[str, str]:
        """(reasoning, text) that this token adds and that may be shown."""
        piece = self._decoder.push(token)
        if self._splitter is None:
            return "", self._stop.push(piece)
        split = self._splitter.push(piece, token)
        return split.reasoning, self._stop.push(split.text)

    def flush(self) -> tuple[str, str]:
        """What was held back, at the end; nothing after a stop string."""
        if self.stopped:
            return "", ""
        piece = self._decoder.flush()
        reasoning, text = "", piece
        if self._splitter is not None:
            first, rest = self._splitter.push(piece), self._splitter.flush()
            reasoning, text = first.reasoning + rest.reasoning, first.text + rest.text
        shown = self._stop.push(text)
        return reasoning, shown + ("" if self.stopped else self._stop.flush())
