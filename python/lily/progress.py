"""Progress bars on a terminal, for what takes long without a word: loading weights and a long prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

Progress = Callable[[int, int], None]
_DELAY_SECONDS = 0.5  # shorter work shows no bar


class TerminalBar:
    """A `progress(done, total)` that draws on standard error where that is a terminal, and clears itself when all is done."""

    def __init__(self, what: str, unit: str) -> None:
        self._what, self._unit = what, unit
        self._bar: tqdm[Any] | None = None
        self._shows = sys.stderr is not None and sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if not self._shows:
            return
        if done >= total:
            self.close()
            return
        if self._bar is None:
            self._bar = tqdm(total=total, unit=self._unit, unit_scale=True, desc=self._what, delay=_DELAY_SECONDS, leave=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
