"""The host's decisions between steps, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from lily.model_files import resolve
from lily.steering import Steering, thought_end
from lily.tokenizer import Tokenizer


class Only:
    """A grammar that allows one token and notes what it was given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def accept(self, token: int) -> None:
        self.seen.append(token)

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        mask[0] = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve("lily-tiny"))


def mask_of(steering: Steering) -> list[int] | None:
    mask = np.full(4, 9, np.uint32)
    return mask.tolist() if steering.fill(mask) else None


def test_a_grammar_begins_after_the_closing_tag_and_what_the_template_writes_behind_it(tokenizer: Tokenizer) -> None:
    grammar = Only()
    steering = Steering(tokenizer, in_thought=True, grammar=grammar)
    assert steering.masks and mask_of(steering) is None and not steering.accept(50) and steering.forced() == ()
    assert steering.accept(tokenizer.control["</think>"])
    assert steering.forced() == tuple(tokenizer.encode("\n\n")) and steering.forced() == ()
    assert mask_of(steering) == [2, 0, 0, 0] and steering.accept(1) and grammar.seen == [1]


def test_without_a_thought_the_first_token_is_masked(tokenizer: Tokenizer) -> None:
    assert mask_of(Steering(tokenizer, in_thought=False, grammar=Only())) == [2, 0, 0, 0]


def test_a_spent_budget_forces_the_end_once(tokenizer: Tokenizer) -> None:
    steering = Steering(tokenizer, in_thought=True, budget=2)
    assert [steering.accept(token) for token in (50, 51)] == [False, True]
    assert steering.forced() == thought_end(tokenizer) and steering.forced() == ()
    assert not any(steering.accept(50) for _ in range(5)) and not steering.masks and mask_of(steering) is None
    closed = Steering(tokenizer, in_thought=True, budget=2)
    assert not closed.accept(tokenizer.control["</think>"]) and not any(closed.accept(50) for _ in range(5)) and closed.forced() == ()


def test_a_budget_waits_for_the_end_of_a_character(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("😀")
    assert len(smile) > 1
    steering = Steering(tokenizer, in_thought=True, budget=1)
    assert [steering.accept(token) for token in smile] == [False] * (len(smile) - 1) + [True]
