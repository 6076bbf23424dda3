"""Finds stop strings in streamed text without ever letting out a part of one."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import RequestError
from .reasoning import overlap

MAX_STOPS = 64


def normal_stops(stop: object) -> tuple[str, ...]:
    """A request's ``stop``: None, a string or a list of non-empty strings. Raises RequestError for anything else."""
    values = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) and value for value in values):
        raise RequestError(f"must be a non-empty string or a list of them, got {stop!r}", where="stop")
    if len(values) > MAX_STOPS:
        raise RequestError(f"has {len(values)} strings, at most {MAX_STOPS} are allowed", where="stop")
    return tuple(dict.fromkeys(values))


class StopMatcher:
    """Push pieces, get the text that is safe to show. ``matched`` is the stop string that was found, or None.

    The first stop string to be completed ends the text, the longest one if several end at that character, so the result
    does not depend on how the text was cut. Text from the match on is never shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Add a piece and return what can be shown; nothing more after a match."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, at the end of the generation."""
        rest, self._held = self._held, ""
        return rest
