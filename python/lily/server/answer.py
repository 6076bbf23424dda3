"""A generation's pieces as the events that every protocol is written from: thought, text, tool calls, the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from ..reply import Piece, Usage
from ..tool_calls import ArgumentDelta, CallCut, CallFinished, CallStarted, TextDelta, ToolCallParser
from ..tool_choice import ToolPlan
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


AnswerEvent = ReasoningDelta | TextDelta | CallStarted | ArgumentDelta | CallFinished | CallCut | Finished


class AnswerReader:
    """Pieces to events. Calls are looked for only if tools were shown; ``parallel`` False keeps the first call only."""

    def __init__(self, plan: ToolPlan | None = None, *, parallel: bool = True) -> None:
        self._parser = ToolCallParser(plan.tools) if plan is not None and plan.tools else None
        self._parallel = parallel
        self._prefix = plan.prefix if plan is not None else ""

    def read(self, piece: Piece) -> list[AnswerEvent]:
        """The events of one piece; Finished comes last."""
        events: list[AnswerEvent] = []
        if piece.reasoning:
            events.append(ReasoningDelta(piece.reasoning))
        prefix, self._prefix = self._prefix, ""
        if self._parser is None:
            events += [TextDelta(piece.text)] if piece.text else []
        else:
            events += self._parser.push(prefix + piece.text)
        if piece.finish_reason is not None:
            reason = piece.finish_reason
            if self._parser is not None:
                events += self._parser.flush(cut=reason != "stop")
                if self._parser.calls and reason == "stop":
                    reason = "tool_calls"
            if piece.usage is None:
                raise RuntimeError("the last piece of a generation has no usage")
            events.append(Finished(reason, piece.usage, getattr(piece, "stop_string", None)))
        return [event for event in events if self._parallel or getattr(event, "index", 0) == 0]


@dataclass
class Answer:
    """A whole answer: the events joined."""

    finished: Finished
    text: str = ""
    reasoning: str = ""
    calls: list[CallFinished] = field(default_factory=list)


async def answer_events(ticket: Ticket, reader: AnswerReader) -> AsyncIterator[AnswerEvent | Prefill]:
    """The events of a queued generation, with the prefill's progress before them. Raises what it raised."""
    finished = False
    async for update in ticket.updates():
        if isinstance(update, Prefill):
            yield update
            continue
        for event in reader.read(update):
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
    return answer
