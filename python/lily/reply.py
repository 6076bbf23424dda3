"""What a generation returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .logprobs import TokenLogprob
from .tool_calls import ArgumentDelta, CallFinished, CallStarted, Event, TextDelta, ToolCallParser


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

    logprobs: one entry for each of token_ids, when asked for. events: `text` and parts of tool calls in their order (tool_calls.py); the calls'
    markup is never in `text`. The last piece carries `finish_reason`, `usage` and, if a stop string ended the answer,
    `stop_string`. Joined, the pieces equal the whole answer.
    """

    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    stop_string: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """What this piece adds to tool calls, as OpenAI's deltas: `index`, with the first of a call `id`, `type` and the function's
        `name`, then parts of its `arguments`. Only a call in `finished_calls` is complete."""
        return tuple(delta for event in self.events if (delta := _call_delta(event)) is not None)

    @property
    def finished_calls(self) -> tuple[dict[str, Any], ...]:
        """Calls that this piece completes, in OpenAI's form."""
        return tuple(event.as_message_call() for event in self.events if isinstance(event, CallFinished))


def _call_delta(event: Event) -> dict[str, Any] | None:
    if isinstance(event, CallStarted):
        return {"index": event.index, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
    if isinstance(event, ArgumentDelta):
        return {"index": event.index, "function": {"arguments": event.text}}
    return None


@dataclass(frozen=True)
class Reply:
    """A whole answer.

    text: the answer without the thought. reasoning: the thought, "" without one. finish_reason: "stop" (a stop id or
    stop string), "length" (max_tokens or the context's end), "tool_calls". tool_calls: calls in OpenAI's form. token_ids: raw generated ids, thought, tool markup and EOS
    included. logprobs: one entry for each of them, when asked for.
    """

    text: str
    reasoning: str
    finish_reason: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = field(default=())
    logprobs: tuple[TokenLogprob, ...] = field(default=())

    def __str__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


class CallReader:
    """Finds the tool calls of a stream's pieces, whose `text` holds what the model wrote.

    prefix: how the prompt opened the answer. several: False ends the answer with its first call. Without tools pieces pass as they are.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, prefix: str = "", several: bool = True) -> None:
        self._parser = ToolCallParser(tools) if tools else None
        self._prefix, self._several = prefix, several
        self.ended = False  # nothing of the answer may follow

    def read(self, piece: Piece) -> Piece:
        """The piece with its calls as events, without their markup. The last one's finish reason becomes "tool_calls" where calls
        are what the answer ended with; one that max_tokens or a stop string cut is neither call nor text."""
        if self._parser is None:
            return piece
        reason = piece.finish_reason
        found = self._parser.push(self._prefix + piece.text) if not self.ended else []
        self._prefix = ""
        if reason is not None and not self.ended:
            found += self._parser.flush(cut=reason != "stop" or piece.stop_string is not None)
        events: list[Event] = []
        for event in found:
            if self.ended:
                break
            events.append(event)
            self.ended = isinstance(event, CallFinished) and not self._several
        if reason == "stop" and self._parser.calls:
            reason = "tool_calls"
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        return replace(piece, text=text, events=tuple(events), finish_reason=reason)


def joined(pieces: Iterable[Piece]) -> Reply:
    """The whole answer of a stream."""
    text, reasoning = "", ""
    ids: list[int] = []
    calls: list[dict[str, Any]] = []
    logprobs: list[TokenLogprob] = []
    last = Piece()
    for last in pieces:
        text, reasoning = text + last.text, reasoning + last.reasoning
        ids += last.token_ids
        calls += last.finished_calls
        logprobs += last.logprobs
    assert last.usage is not None and last.finish_reason is not None
    return Reply(text, reasoning, last.finish_reason, last.usage, tuple(ids), tuple(calls), tuple(logprobs))
