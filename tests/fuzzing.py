"""What the fuzz tests share: a short run for every day and a long one (`pytest -m slow`), a limit of time, and strategies for hostile values."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LONG = 40  # times as many examples in the long run
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<function=f>", "</function>",
           "<parameter=a>", "</parameter>"]


def runs(short: int) -> Any:
    """Parametrizes `run`: the same short run every time, and a long one at random that is marked slow."""
    common: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    return pytest.mark.parametrize("run", [
        pytest.param(settings(max_examples=short, derandomize=True, **common), id="short"),
        pytest.param(settings(max_examples=short * LONG, **common), id="long", marks=pytest.mark.slow),
    ])


def attempts(run: settings, *strategies: Any, body: Callable[..., None]) -> None:
    """Runs the body with drawn values; it is a failure if one takes more than 30 seconds."""

    @run
    @given(st.tuples(*strategies))
    def attempt(values: tuple[Any, ...]) -> None:
        with within(30):
            body(*values)

    attempt()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Interrupts what hangs."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


texts = st.lists(st.sampled_from([*CONTROL, "Hi", " ", "\n", "\ue000", "\ud800", "😀", "\x00", "{{ 1 }}", "é"]) | st.text(max_size=4), max_size=6).map("".join)
names = st.sampled_from(["role", "content", "type", "text", "name", "function", "arguments", "tool_calls", "id", "parameters", "properties", "reasoning_content"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names | texts, inner, max_size=3), max_leaves=8,
)


@st.composite
def mutated(draw: Any, good: Any) -> Any:
    """A good JSON value of which up to three places hold another value, are gone, or stand twice."""
    value = draw(good)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2, 3]))):
        value = _changed(draw, value)
    return value


def _changed(draw: Any, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 7)) == 0:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(value) - 1))
        change = draw(st.integers(0, 7))
        middle = [] if change == 0 else [value[at]] * 2 if change == 1 else [_changed(draw, value[at])]
        return [*value[:at], *middle, *value[at + 1 :]]
    return draw(json_values)


calls = st.fixed_dictionaries({"id": texts, "type": st.just("function"), "function": st.fixed_dictionaries({
    "name": st.just("f") | texts, "arguments": st.just('{"a": 1}') | st.dictionaries(texts, json_values, max_size=2) | texts})})
contents = texts | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3)
good_messages = st.lists(st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]), "content": contents}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | contents, "tool_calls": st.lists(calls, max_size=2)}, optional={"reasoning_content": texts}),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": texts, "content": contents}),
), min_size=1, max_size=5)
good_tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries(
    {"name": st.just("f") | texts}, optional={"description": texts, "parameters": st.dictionaries(names | texts, json_values, max_size=3)})}), max_size=2)
