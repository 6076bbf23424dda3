"""A generation's pieces as the events that every protocol is written from: thought, text, tool calls, the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ..logprobs import TokenLogprob
from ..reply import Piece, Usage
from ..tool_calls import ArgumentDelta, CallCut, CallFinished, CallStarted, TextDelta
from .errors import ApiError
from .worker import Prefill, Ticket


@dataclass(frozen=True)
class ReasoningDelta:
    """A part of the thought."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The end. reason: "stop", "length" or "tool_calls". stop_string: the stop string that ended the answer, if one did."""

    reason: str
    usage: Usage
    stop_string: str | None = None


@dataclass(frozen=True)
class Logprobs:
    """Of tokens of the answer; text that they are about may come later."""

    tokens: tuple[TokenLogprob, ...]


AnswerEvent = Logprobs | ReasoningDelta | TextDelta | CallStarted | ArgumentDelta | CallFinished | CallCut | Finished


def piece_events(piece: Piece) -> list[AnswerEvent]:
    """The events of one piece; Finished comes last."""
    events: list[AnswerEvent] = []
    if tokens := tuple(entry for entry in piece.logprobs if entry.place == "answer"):
        events.append(Logprobs(tokens))
    if piece.reasoning:
        events.append(ReasoningDelta(piece.reasoning))
    if piece.events:
        events += piece.events
    elif piece.text:
        events.append(TextDelta(piece.text))
    if piece.finish_reason is not None:
        if piece.usage is None:
            raise RuntimeError("the last piece of a generation has no usage")
        events.append(Finished(piece.finish_reason, piece.usage, piece.stop_string))
    return events


@dataclass
class Answer:
    """A whole answer: the events joined."""

    finished: Finished
    text: str = ""
    reasoning: str = ""
    calls: list[CallFinished] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


async def answer_events(ticket: Ticket) -> AsyncIterator[AnswerEvent | Prefill]:
    """The events of a queued generation, with the prefill's progress before them. Raises what it raised."""
    finished = False
    async for update in ticket.updates():
        if isinstance(update, Prefill):
            yield update
            continue
        for event in piece_events(update):
            finished = finished or isinstance(event, Finished)
            yield event
    if not finished:
        raise ApiError(503, "the generation ended early", code="cancelled")


def joined(events: list[AnswerEvent]) -> Answer:
    """The whole answer; what a stream of these events shows, but for calls that were cut."""
    finished = next(event for event in events if isinstance(event, Finished))
    answer = Answer(finished)
    for event in events:
        if isinstance(event, TextDelta):
            answer.text += event.text
        elif isinstance(event, ReasoningDelta):
            answer.reasoning += event.text
        elif isinstance(event, CallFinished):
            answer.calls.append(event)
        elif isinstance(event, Logprobs):
            answer.logprobs += event.tokens
    return answer
