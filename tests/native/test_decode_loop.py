"""lily._native.DecodeLoop on a kernel that advances a StepState."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.native.tools import native

NEVER = 0xFFFFFFFF


def make(kernels: Any, stop: int = NEVER, in_flight: int = 2, first_step: int = 0) -> tuple[Any, Any]:
    state = kernels.device.buffer(native.struct_layouts()["StepState"]["size"])
    state.fill(0)
    state.view().view(np.uint32)[2] = first_step
    program = native.Program(kernels.device, [kernels.dispatch("advance_step", [(0, state, 0)], stop)])
    return native.DecodeLoop(program, state, in_flight), state


def step_of(state: Any) -> int:
    return int(state.view().view(np.uint32)[2])


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("first_step", [0, 13])
def test_delivers_every_step_once(kernels: Any, in_flight: int, first_step: int) -> None:
    loop, state = make(kernels, in_flight=in_flight, first_step=first_step)
    loop.start(40)
    tokens = list(iter(loop.next, None))
    assert tokens == [(100 + first_step + i, 0) for i in range(40)]
    assert loop.drain() == 0 and step_of(state) == first_step + 40
    assert loop.gpu_ms > 0


def test_a_step_state_that_the_cpu_does_not_see_is_copied_out_after_every_step(kernels: Any) -> None:
    size = native.struct_layouts()["StepState"]["size"]
    hidden, copy = kernels.device.buffer(size, storage="private"), kernels.device.buffer(size)
    program = native.Program(kernels.device, [kernels.dispatch("advance_step", [(0, hidden, 0)], NEVER)])
    hidden.fill(0)
    copy.fill(0)
    with pytest.raises(ValueError, match="private storage"):
        native.DecodeLoop(program, hidden, 2)
    loop = native.DecodeLoop(program, hidden, 2, copy)
    loop.start(20)
    assert list(iter(loop.next, None)) == [(100 + i, 0) for i in range(20)]
    loop.drain()
    assert step_of(copy) == 20


def test_stop_leaves_steps_in_flight_without_effect(kernels: Any) -> None:
    loop, state = make(kernels, stop=5)
    loop.start(100)
    tokens = list(iter(loop.next, None))
    assert tokens == [(100 + i, 0) for i in range(5)] + [(105, 1)]
    loop.drain()
    assert step_of(state) == 6  # the two steps behind the stop did nothing
    assert state.view().view(np.uint32)[0] == 6


def test_drain_counts_what_ran_ahead(kernels: Any) -> None:
    loop, state = make(kernels)
    loop.start(100)
    for _ in range(3):
        loop.next()
    ahead = loop.drain()
    assert ahead == 2 and step_of(state) == 3 + ahead
    assert loop.next() is None
    loop.start(2)
    assert [loop.next(), loop.next(), loop.next()] == [(105, 0), (106, 0), None]


def test_never_more_ahead_than_allowed(kernels: Any) -> None:
    loop, state = make(kernels)
    loop.start(3)
    assert loop.next() == (100, 0)
    loop.drain()
    assert step_of(state) == 3


def test_program_can_be_swapped_between_steps(kernels: Any) -> None:
    loop, state = make(kernels)
    other = native.Program(kernels.device, [kernels.dispatch("advance_step", [(0, state, 0)], 6)])
    loop.start(20)
    loop.next()
    loop.set_program(other)
    assert [t for t, _ in iter(loop.next, None)][-1] == 106


def test_no_objects_per_step(kernels: Any) -> None:
    loop, _ = make(kernels)
    loop.start(300)
    loop.next()
    buffers, live = native.buffers_created(), native.live_objects()
    for _ in range(250):
        loop.next()
    assert native.buffers_created() == buffers
    if live is not None:
        assert native.live_objects() <= live + 16


def test_fault_in_a_step(kernels: Any) -> None:
    from lily.errors import DeviceError

    state = kernels.device.buffer(256)
    state.fill(0)
    program = native.Program(kernels.device, [kernels.dispatch("diverge", [(0, state, 0)], threads=64)])
    loop = native.DecodeLoop(program, state)
    loop.start(3)
    with pytest.raises(DeviceError, match="barrier"):
        loop.next()
    assert loop.next() is None


def test_wrong_use(kernels: Any) -> None:
    loop, state = make(kernels)
    program = native.Program(kernels.device, [])
    with pytest.raises(ValueError, match="max_in_flight"):
        native.DecodeLoop(program, state, 3)
    with pytest.raises(ValueError, match="smaller"):
        native.DecodeLoop(program, kernels.device.buffer(16), 2)
    loop.start(5)
    with pytest.raises(ValueError, match="drain first"):
        loop.start(5)
    loop.drain()
    loop.start(0)
    assert loop.next() is None
