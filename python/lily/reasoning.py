"""Splits generated text into the thought and the answer, piece by piece.

Templates of this family open `<think>` at the end of the prompt, so a generation begins inside the thought and the first
`</think>` ends it. The template writes `<think>\\n`, the thought, `\\n</think>\\n\\n`, the answer: those line breaks belong
to neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Split(NamedTuple):
    """What one piece added to the thought and to the answer."""

    reasoning: str
    text: str


def prompt_opens_thought(prompt_ids: Sequence[int], open_id: int | None, close_id: int | None) -> bool:
    """Whether a prompt ends inside a thought: of the tags' tokens, `<think>` came last. Text tags of users are no tokens."""
    for token in reversed(prompt_ids):
        if token == open_id:
            return True
        if token == close_id:
            return False
    return False


class ReasoningSplitter:
    """Push pieces of decoded text, get what they add; the parts joined do not depend on how the text was cut.

    ``in_thought``: the prompt opened a thought. Otherwise only a `<think>` at the very beginning of the text opens one.
    ``close_id``: id of `</think>` when it is a token; a pushed id equal to it ends the thought even if the decoder hides it.
    """

    def __init__(self, in_thought: bool, *, open_tag: str = OPEN, close_tag: str = CLOSE, close_id: int | None = None) -> None:
        self._open, self._close, self._close_id = open_tag, close_tag, close_id
        self._state: Literal["start", "thought_start", "thought", "text_start", "text"] = "thought_start" if in_thought else "start"
        self._held = ""

    @property
    def in_thought(self) -> bool:
        """Whether the thought is still open; a run cut here is all reasoning."""
        return self._state in ("thought_start", "thought")

    @property
    def in_answer(self) -> bool:
        """Whether the thought and the line breaks after it are over, or none was opened."""
        return self._state in ("start", "text")

    def push(self, piece: str, token_id: int | None = None) -> Split:
        """Add a piece of text; ``token_id`` is the token that it came from, if it came from one."""
        if token_id is not None and token_id == self._close_id and self.in_thought and self._close not in self._held + piece:
            piece += self._close
        self._held += piece
        return self._advance(final=False)

    def flush(self) -> Split:
        """What was held back, at the end of the generation."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> Split:
        reasoning, text = "", ""
        while True:
            state = self._state
            if state == "start":
                if not self._leave_start(final):
                    break
            elif state in ("thought_start", "text_start"):
                self._held = self._held.lstrip("\n")
                if not self._held:
                    break
                self._state = "thought" if state == "thought_start" else "text"
            elif state == "thought":
                before, tag, after = self._held.partition(self._close)
                if not tag:
                    keep = 0 if final else _unsure(self._held, self._close)
                    cut = len(self._held) - keep
                    reasoning, self._held = reasoning + self._held[:cut], self._held[cut:]
                    break
                reasoning += before.rstrip("\n")
                self._held, self._state = after, "text_start"
            else:
                text, self._held = text + self._held, ""
                break
        return Split(reasoning, text)

    def _leave_start(self, final: bool) -> bool:
        """Decide whether the text begins with a thought of its own; False while that is open."""
        stripped = self._held.lstrip()
        if stripped.startswith(self._open):
            self._held, self._state = stripped[len(self._open):], "thought_start"
        elif final or not self._open.startswith(stripped):
            self._state = "text"
        else:
            return False
        return True


def _unsure(text: str, tag: str) -> int:
    """How many characters at the end may yet turn out to be line breaks before the tag, or a part of the tag."""
    length = overlap(text, tag)
    body = text[: len(text) - length]
    return length + len(body) - len(body.rstrip("\n"))


def overlap(text: str, pattern: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``pattern``, the whole pattern excluded."""
    for length in range(min(len(text), len(pattern) - 1), 0, -1):
        if text.endswith(pattern[:length]):
            return length
    return 0


def split_reasoning(text: str, in_thought: bool) -> Split:
    """The whole text at once; equal to the joined parts of any way to push it."""
    splitter = ReasoningSplitter(in_thought)
    first, rest = splitter.push(text), splitter.flush()
    return Split(first.reasoning + rest.reasoning, first.text + rest.text)
