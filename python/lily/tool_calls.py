"""Finds tool calls in generated text, piece by piece.

The format of the model family, as its templates show it to the model:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One line break after `<parameter=KEY>` and one before `</parameter>` belong to the format. A value may hold anything, tags
too: it ends at a `</parameter>` that another part of the format follows. White space around calls belongs to neither side.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .reasoning import overlap
from .tool_arguments import ArgumentTypes

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"

_AFTER_VALUE = (PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE)
# The second way is a value whose own end is missing, seen by the next call.
_VALUE_END = re.compile(rf"{PARAMETER_CLOSE}\s*(?={'|'.join(_AFTER_VALUE)})|(?={FUNCTION_CLOSE}\s*{CALL_CLOSE}\s*{CALL_OPEN}\s*{FUNCTION_OPEN})")
_UNCLOSED_VALUE = re.compile(rf"{FUNCTION_CLOSE}\s*(?:{CALL_CLOSE}|$)")
_IN_BODY = re.compile("|".join((PARAMETER_OPEN, FUNCTION_CLOSE, CALL_CLOSE, FUNCTION_OPEN, CALL_OPEN)))
_NAME_END = re.compile("[>\n]")


@dataclass(frozen=True)
class TextDelta:
    """Text beside the calls."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """A call's name is known. Indexes count from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentDelta:
    """A part of a call's arguments as JSON text. Joined they are the whole object; before CallFinished they never parse."""

    index: int
    text: str


@dataclass(frozen=True)
class CallFinished:
    """A complete call, which may be executed. arguments: JSON text of an object."""

    index: int
    id: str
    name: str
    arguments: str

    def as_message_call(self) -> dict[str, Any]:
        """The entry of a message's ``tool_calls`` in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class CallCut:
    """The text ended inside a call that had started: it must not be executed."""

    index: int


Event = TextDelta | CallStarted | ArgumentDelta | CallFinished | CallCut


def split_tool_calls(text: str, tools: Iterable[Mapping[str, Any]] | None, *, cut: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """(content, complete calls in OpenAI's form) of a whole answer; the same that its pieces give."""
    parser = ToolCallParser(tools)
    events = parser.push(text) + parser.flush(cut)
    content = "".join(event.text for event in events if isinstance(event, TextDelta))
    return content, [event.as_message_call() for event in events if isinstance(event, CallFinished)]


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Push pieces of answer text, get events; what they say does not depend on how the text was cut.

    ``tools``: the offered ones, whose schemas type the arguments. A function that was not offered is reported all the same.
    After a forced opening (`ToolPlan.prefix`), push that first.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None, *, new_id: Callable[[], str] = new_call_id) -> None:
        self._types = ArgumentTypes(tools)
        self._new_id = new_id
        # Models of the family at times leave `<tool_call>` out; an offered name makes that unmistakable.
        self._openers = (CALL_OPEN, *(f"{FUNCTION_OPEN}{name}>" for name in self._types.names))
        self._opener = re.compile("|".join(map(re.escape, self._openers)))
        self._step: Callable[[], bool] = self._text
        self._held = ""
        self._events: list[Event] = []
        self._gap = ""  # white space before the last opening tag
        self._separator: str | None = None  # after a call: what divides the text before it from text that may follow
        self._has_text = False
        self._count = 0
        self._index, self._id, self._name = -1, "", ""
        self._arguments: list[str] = []
        self._keys: set[str] = set()
        self._key = ""
        self._value: list[str] = []
        self._streamed = self._value_begun = False

    @property
    def calls(self) -> int:
        """How many calls are complete."""
        return self._count

    def push(self, piece: str) -> list[Event]:
        """What this piece adds."""
        self._held += piece
        return self._run()

    def flush(self, cut: bool = False) -> list[Event]:
        """What was held back, at the end. ``cut``: the text ended at a limit, so an opened call is not complete."""
        self._run_into_events()
        while not cut and self._step == self._value_text and (match := _UNCLOSED_VALUE.search(self._held)):
            self._end_value(match.start())
            self._run_into_events()
        if self._step == self._closed and not cut:
            self._finish()
        elif self._step == self._text:
            self._say(self._held[: len(self._held) - self._markup_tail()] if cut else self._held)
        elif self._step == self._opened and not cut:
            self._say(self._gap + CALL_OPEN + self._held)
        elif self._step in (self._body, self._key_text, self._value_text, self._closed):
            self._events.append(CallCut(self._index))
        self._held, self._step = "", self._text
        return self._taken()

    # -- the machine: each step consumes a part of what is held, or says False when it needs more ---------------------------
    def _run(self) -> list[Event]:
        self._run_into_events()
        return self._taken()

    def _run_into_events(self) -> None:
        while self._step():
            pass

    def _taken(self) -> list[Event]:
        """The events so far, neighbours of one kind joined."""
        joined: list[Event] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if isinstance(event, TextDelta) and isinstance(last, TextDelta):
                joined[-1] = TextDelta(last.text + event.text)
            elif isinstance(event, ArgumentDelta) and isinstance(last, ArgumentDelta) and last.index == event.index:
                joined[-1] = ArgumentDelta(event.index, last.text + event.text)
            else:
                joined.append(event)
        self._events = []
        return joined

    def _text(self) -> bool:
        match = self._opener.search(self._held)
        end = match.start() if match else len(self._held) - max(overlap(self._held, opener) for opener in self._openers)
        shown = self._held[:end].rstrip()
        self._say(shown)
        if match is None:
            self._held = self._held[len(shown):]
            return False
        self._gap = self._held[len(shown):end]
        if match[0] == CALL_OPEN:
            self._held, self._step = self._held[match.end():], self._opened
        else:
            self._held, self._step = self._held[end + len(FUNCTION_OPEN):], self._function_name
        return True

    def _opened(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(FUNCTION_OPEN):
            self._held, self._step = rest[len(FUNCTION_OPEN):], self._function_name
        elif FUNCTION_OPEN.startswith(rest):
            return False
        else:  # the answer only speaks of the tag
            self._say(self._gap + CALL_OPEN)
            self._step = self._text
        return True

    def _function_name(self) -> bool:
        name = self._take_name()
        if name is None:
            return False
        self._separator = self._separator if self._separator is not None else self._gap
        self._index += 1
        self._id, self._name, self._arguments, self._keys = self._new_id(), name, [], set()
        self._events.append(CallStarted(self._index, self._id, name))
        self._argue("{")
        self._step = self._body
        return True

    def _body(self) -> bool:
        match = _IN_BODY.search(self._held)
        if match is None:
            return False
        tag = match[0]
        self._held = self._held[match.end():]
        if tag == PARAMETER_OPEN:
            self._step = self._key_text
        elif tag == FUNCTION_CLOSE:
            self._step = self._closed
        else:
            self._finish()
            self._step = {CALL_CLOSE: self._text, CALL_OPEN: self._opened, FUNCTION_OPEN: self._function_name}[tag]
        return True

    def _key_text(self) -> bool:
        key = self._take_name()
        if key is None:
            return False
        self._key, self._value, self._value_begun = key, [], False
        self._streamed = key not in self._keys and self._types.is_plain_string(self._name, key)
        self._step = self._value_text
        return True

    def _value_text(self) -> bool:
        if not self._value_begun:
            if not self._held:
                return False
            self._held = self._held.removeprefix("\n")
            self._value_begun = True
            if self._streamed:
                self._argue(f'{self._comma()}{json.dumps(self._key, ensure_ascii=False)}: "')
        match = _VALUE_END.search(self._held)
        if match is None:
            sure = _sure_of_value(self._held)
            self._add_to_value(self._held[:sure])
            self._held = self._held[sure:]
            return False
        self._end_value(match.start(), match.end())
        return True

    def _closed(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(CALL_CLOSE):
            self._held, self._step = rest[len(CALL_CLOSE):], self._text
        elif rest.startswith(FUNCTION_OPEN):  # several functions in one block
            self._held, self._step = rest[len(FUNCTION_OPEN):], self._function_name
        elif CALL_CLOSE.startswith(rest) or FUNCTION_OPEN.startswith(rest):
            return False
        else:
            self._step = self._text
        self._finish()
        return True

    # -- parts -----------------------------------------------------------------------------------------------------------
    def _take_name(self) -> str | None:
        """A name up to its `>`; a forgotten one ends with the line."""
        match = _NAME_END.search(self._held)
        if match is None:
            return None
        name = self._held[: match.start()].strip().strip("\"'")
        self._held = self._held[match.end() if match[0] == ">" else match.start():]
        return name

    def _comma(self) -> str:
        comma = ", " if self._keys else ""
        self._keys.add(self._key)
        return comma

    def _add_to_value(self, text: str) -> None:
        if self._streamed and text:
            self._argue(json.dumps(text, ensure_ascii=False)[1:-1])
        elif text:
            self._value.append(text)

    def _end_value(self, start: int, end: int | None = None) -> None:
        self._add_to_value(self._held[:start].removesuffix("\n"))
        self._held, self._step = self._held[start if end is None else end:], self._body
        if self._streamed:
            self._argue('"')
        elif self._key not in self._keys:  # of a key given twice the first stands: it has been passed on already
            value = self._types.convert(self._name, self._key, "".join(self._value))
            self._argue(self._comma() + json.dumps({self._key: value}, ensure_ascii=False)[1:-1])

    def _argue(self, text: str) -> None:
        self._arguments.append(text)
        self._events.append(ArgumentDelta(self._index, text))

    def _finish(self) -> None:
        self._argue("}")
        self._events.append(CallFinished(self._index, self._id, self._name, "".join(self._arguments)))
        self._count += 1

    def _say(self, text: str) -> None:
        if self._separator is not None:
            bare = text.lstrip()
            between = self._separator or text[: len(text) - len(bare)]
            text = bare
            if bare:
                text, self._separator = (between if self._has_text else "") + bare, None
        if text:
            self._has_text = True
            self._events.append(TextDelta(text))

    def _markup_tail(self) -> int:
        """Length of an opening tag's beginning at the end of what is held, if it is long enough not to be ordinary text."""
        length = max(overlap(self._held, opener) for opener in self._openers)
        return length if length >= len("<tool_") else 0


def _sure_of_value(held: str) -> int:
    """How many characters at the beginning of ``held`` belong to the value whatever follows."""
    end = len(held) - max(overlap(held, PARAMETER_CLOSE), overlap(held, FUNCTION_CLOSE))
    at = held.rfind(PARAMETER_CLOSE)
    if at >= 0 and _may_become(held[at + len(PARAMETER_CLOSE):].lstrip(), _AFTER_VALUE):
        end = min(end, at)
    at = held.find(FUNCTION_CLOSE)
    while at >= 0:
        rest = held[at + len(FUNCTION_CLOSE):].lstrip()
        if rest.startswith(CALL_CLOSE) or _may_become(rest, (CALL_CLOSE,)):
            end = min(end, at)
            break
        at = held.find(FUNCTION_CLOSE, at + 1)
    return end - 1 if held[:end].endswith("\n") else end


def _may_become(text: str, tags: Iterable[str]) -> bool:
    return any(tag.startswith(text) for tag in tags)
