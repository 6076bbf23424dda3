"""What the host decides between two steps: the end of a thought whose budget is spent, and a grammar's mask.

Without either, steps run ahead of the host. A thought that a budget limits runs ahead until the budget is spent. A grammar
begins after the thought and needs the host before each token.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .reasoning import CLOSE
from .tokenizer import Tokenizer

AFTER_THOUGHT = "\n\n"  # what the template writes between the closing tag and the answer


class Grammar(Protocol):
    """The set of texts that an answer may be, token by token."""

    def accept(self, token: int) -> None:
        """The next token of the answer."""

    def fill(self, mask: np.ndarray) -> None:
        """Sets the bits of the allowed next tokens: uint32 [ceil(vocab / 32)]."""


def thought_end(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that close a thought as the template does, up to the answer's first character."""
    return tuple(tokenizer.encode(f"\n{CLOSE}{AFTER_THOUGHT}", control=True))


class Steering:
    """One generation's decisions. Tokens that the session samples are given to `accept`; `forced` says what must follow."""

    def __init__(self, tokenizer: Tokenizer, *, in_thought: bool, budget: int | None = None, grammar: Grammar | None = None) -> None:
        """in_thought: the prompt opened a thought. budget: tokens that the thought may have, None = any number; a character that
        the budget would cut is finished first. grammar: of the answer."""
        self._in_thought, self._budget, self._grammar = in_thought, budget, grammar
        self._tag = tokenizer.control.get(CLOSE)
        self._close = thought_end(tokenizer)
        self._gap = tuple(tokenizer.encode(AFTER_THOUGHT))
        self._decoder = tokenizer.stream_decoder()
        self._spent = 0
        self._forced: tuple[int, ...] = ()

    @property
    def masks(self) -> bool:
        """Whether any step may have a mask."""
        return self._grammar is not None

    def accept(self, token: int) -> bool:
        """A sampled token. Returns whether the steps that were run ahead of it must be dropped: `forced` and `fill` say why."""
        if not self._in_thought:
            if self._grammar is not None:
                self._grammar.accept(token)
            return self._grammar is not None
        if token == self._tag:
            self._in_thought = False
            self._forced = self._gap if self._grammar is not None else ()
            return self._grammar is not None
        self._spent += 1
        self._decoder.push(token)
        if self._budget is not None and self._spent >= self._budget and not self._decoder.pending:
            self._in_thought = False
            self._forced = self._close
            return True
        return False

    def forced(self) -> tuple[int, ...]:
        """Ids that come next without being sampled; asked for once."""
        forced, self._forced = self._forced, ()
        return forced

    def fill(self, mask: np.ndarray) -> bool:
        """Whether the next token is masked, and then its mask."""
        if self._grammar is None or self._in_thought:
            return False
        self._grammar.fill(mask)
        return True
