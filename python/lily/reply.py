"""What a generation returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Token counts and times of one generation.

    cached_tokens: prompt tokens that needed no computing. prefill_seconds covers the prompt up to the first token,
    decode_seconds the tokens after it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def prefill_rate(self) -> float:
        """Computed prompt tokens per second."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return max(0, self.completion_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Piece:
    """A part of a streamed answer: new `text` and `reasoning`, and the raw ids they came from.

    The last piece carries `finish_reason`, `usage` and, if a stop string ended the answer, `stop_string`. Joined, the pieces equal the whole answer.
    """

    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Reply:
    """A whole answer.

    text: the answer without the thought. reasoning: the thought, "" without one. finish_reason: "stop" (a stop id or
    stop string), "length" (max_tokens or the context's end), "tool_calls". tool_calls: calls in OpenAI's form. token_ids: raw generated ids, thought, tool markup and EOS
    included.
    """

    text: str
    reasoning: str
    finish_reason: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = field(default=())

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text
