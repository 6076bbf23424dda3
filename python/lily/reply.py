"""What a generation returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .tool_calls import split_tool_calls


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


def with_calls(reply: Reply, tools: Any) -> Reply:
    """Tool calls of the answer in OpenAI's form; one that max_tokens cut is neither call nor text."""
    if not tools or not isinstance(tools, (list, tuple)):
        return reply
    text, calls = split_tool_calls(reply.text, tools, cut=reply.finish_reason != "stop")
    reason = "tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason
    return replace(reply, text=text, tool_calls=tuple(calls), finish_reason=reason)


def joined(pieces: Iterator[Piece]) -> Reply:
    """The whole answer of a stream."""
    text, reasoning = "", ""
    ids: list[int] = []
    last = Piece()
    for last in pieces:
        text, reasoning = text + last.text, reasoning + last.reasoning
        ids += last.token_ids
    assert last.usage is not None and last.finish_reason is not None
    return Reply(text, reasoning, last.finish_reason, last.usage, tuple(ids))
