"""Where a rendered conversation will be continued or changed: the places of a prompt worth a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .reasoning import OPEN

MESSAGE = "<|im_start|>"
_HEADER = 8  # a role's name and a newline take fewer tokens


@dataclass(frozen=True)
class Marks:
    """Token counts, 0 = none. `turn`: all up to the end of the last user turn and the answer's header, before the thought
    that the prompt opens; the history of the next turn holds them unchanged, but not the thought (case 11).
    `message`: all before the last message, which prompts with a common head do not share."""

    message: int = 0
    turn: int = 0


def turn_marks(ids: Sequence[int], control: Mapping[str, int]) -> Marks:
    """Marks of a prompt rendered by the model's template; none for other text."""
    starts = [i for i, token in enumerate(ids) if token == control.get(MESSAGE)]
    if not starts:
        return Marks()
    last, thought = starts[-1], control.get(OPEN)
    opened = next((i for i in range(last, len(ids)) if ids[i] == thought), None)
    turn = opened if opened is not None else len(ids) if len(ids) - last <= _HEADER else 0
    return Marks(starts[-2] if len(starts) > 1 else 0, turn)
