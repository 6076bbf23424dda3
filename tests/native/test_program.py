"""lily._native.Program: order, cuts into command buffers, faults, interrupts, counters."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native.tools import native

ROOT = Path(__file__).parents[2]


def words(buffer: Any) -> np.ndarray:
    return buffer.view().view(np.uint32)


def chain(kernels: Any, buffer: Any, cost: float = 1000.0) -> list[Any]:
    """x = (x + 1) * 3, six times, a barrier before each."""
    names = ["add_one", "multiply"] * 6
    return [kernels.dispatch(name, [(0, buffer, 0)], 64, groups=2, barrier=True, cost=cost) for name in names]


def chain_result(x: int) -> int:
    for _ in range(6):
        x = (x + 1) * 3
    return x


@pytest.mark.parametrize("concurrent", [True, False])
def test_barriers_order_dispatches(kernels: Any, concurrent: bool) -> None:
    buffer = kernels.device.buffer(256)
    words(buffer)[:] = 5
    program = native.Program(kernels.device, chain(kernels, buffer), concurrent)
    assert (program.dispatch_count, program.barrier_count) == (12, 11)
    result = program.run()
    assert result["command_buffers"] == 1 and result["gpu_ms"] > 0
    assert (words(buffer) == chain_result(5)).all()


def test_case_39_long_programs_are_cut_at_barriers(kernels: Any) -> None:
    buffer = kernels.device.buffer(256)
    words(buffer)[:] = 2
    device = native.Device()  # its own cost rate
    kernels_here = type(kernels)()
    assert kernels_here.device is not device
    program = native.Program(kernels_here.device, chain(kernels_here, buffer, cost=40e6))
    result = program.run(max_ms=50.0)
    assert result["command_buffers"] > 1
    assert (words(buffer) == chain_result(2)).all()
    # The estimate of 40 ms was far too high: once corrected, everything fits into one command buffer.
    for _ in range(30):
        result = program.run(max_ms=50.0)
    assert result["command_buffers"] == 1


def test_offsets_args_and_threadgroup_memory(kernels: Any) -> None:
    buffer = kernels.device.buffer(512)
    buffer.fill(0)
    kernels.device.run_once(
        [
            kernels.dispatch("add_one", [(0, buffer, 256)], 10),
            kernels.dispatch("scratch", [(0, buffer, 0)], memory=((0, 128),)),
        ]
    )
    np.testing.assert_array_equal(words(buffer)[:32], np.arange(31, -1, -1))
    np.testing.assert_array_equal(words(buffer)[64:], [1] * 10 + [0] * 54)


def test_function_constants(kernels: Any) -> None:
    buffer = kernels.device.buffer(256)
    words(buffer)[:] = 1
    kernels.device.run_once([kernels.dispatch("multiply", [(0, buffer, 0)], 64, groups=2, scale=s, barrier=True) for s in (5, 7)])
    assert (words(buffer) == 35).all()
    from lily.errors import DeviceError

    with pytest.raises(DeviceError, match="scale"):
        kernels.device.pipeline(kernels.library, "multiply", {})
    with pytest.raises(ValueError, match="expected bool"):
        kernels.device.pipeline(kernels.library, "multiply", {0: ("double", 1.0)})
    with pytest.raises(DeviceError, match="no_such_kernel"):
        kernels.device.pipeline(kernels.library, "no_such_kernel", {0: ("uint", 1)})


def test_library_errors_name_the_line(kernels: Any) -> None:
    from lily.errors import DeviceError

    with pytest.raises(DeviceError, match=r"bad kernels: .*3"):
        kernels.device.library("#include <metal_stdlib>\nusing namespace metal;\nkernel void f(device int *x [[buffer(0)]]) { x[0] = y; }\n", "bad kernels")
    with pytest.raises(ValueError, match="language version"):
        kernels.device.library("", "x", "9.9")


@pytest.mark.parametrize(
    "change, match",
    [
        ({"threads": 2048}, "2048 threads"),
        ({"groups": 0}, "empty grid"),
        ({"bindings": [(31, None, 0)]}, "index 31"),
        ({"bindings": [(0, None, 256)]}, "beyond buffer"),
    ],
)
def test_mistakes_are_refused_when_recording(kernels: Any, change: dict[str, Any], match: str) -> None:
    buffer = kernels.device.buffer(256, label="small")
    bindings = [(i, buffer, offset) for i, _, offset in change.pop("bindings", [(0, None, 0)])]
    with pytest.raises(ValueError, match=match):
        native.Program(kernels.device, [kernels.dispatch("add_one", bindings, 1, **change)])


def test_case_39_a_fault_is_a_device_error_and_the_device_lives(kernels: Any) -> None:
    from lily.errors import DeviceError

    buffer = kernels.device.buffer(256)
    buffer.fill(0)
    with pytest.raises(DeviceError, match="barrier"):
        kernels.device.run_once([kernels.dispatch("diverge", [(0, buffer, 0)], threads=64)])
    buffer.fill(0)
    kernels.device.run_once([kernels.dispatch("add_one", [(0, buffer, 0)], 64, groups=2)])
    assert (words(buffer) == 1).all()


def test_no_buffer_and_no_leak_per_run(kernels: Any) -> None:
    buffer = kernels.device.buffer(256)
    program = native.Program(kernels.device, chain(kernels, buffer))
    program.run()
    buffers, live = native.buffers_created(), native.live_objects()
    for _ in range(200):
        program.run()
    assert native.buffers_created() == buffers
    if live is not None:
        assert settled_objects() <= live + 2  # a queue's thread may hold the last command buffer for a moment


def settled_objects() -> int:
    gc.collect()
    lowest = native.live_objects()
    for _ in range(100):
        time.sleep(0.001)
        lowest = min(lowest, native.live_objects())
    return lowest


def test_several_threads(kernels: Any) -> None:
    buffers = [kernels.device.buffer(256) for _ in range(4)]
    for buffer in buffers:
        buffer.fill(0)

    def work(buffer: Any) -> None:
        program = native.Program(kernels.device, [kernels.dispatch("add_one", [(0, buffer, 0)], 64, groups=2)])
        for _ in range(50):
            program.run()

    threads = [threading.Thread(target=work, args=(b,)) for b in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((words(b) == 50).all() for b in buffers)


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    preamble = "from tests.native.tools import Kernels, native\nk = Kernels()\nb = k.device.buffer(4096)\n"
    path = os.pathsep.join([str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_interrupt_waits_for_what_is_in_flight() -> None:
    result = child(
        """
        import os, signal, threading, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with it ignored
        program = native.Program(k.device, [k.dispatch("slow", [(0, b, 0)], 2_000_000, groups=8, threads=128, barrier=True, cost=1e9)] * 40)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.time()
        try:
            program.run()
            print("finished")
        except KeyboardInterrupt:
            print("interrupted")
        b.fill(0)
        k.device.run_once([k.dispatch("add_one", [(0, b, 0)], 8)])
        print(b.view()[0])
        """
    )
    assert result.stdout.split() == ["interrupted", "1"], result.stdout + result.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_use_after_fork_is_refused() -> None:
    result = child(
        """
        import os, sys
        program = native.Program(k.device, [k.dispatch("add_one", [(0, b, 0)], 8)])
        program.run()
        pid = os.fork()
        if pid == 0:
            try:
                program.run()
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        program.run()
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("DeviceError") and "fork" in result.stdout


def test_exit_with_work_in_flight_is_clean() -> None:
    result = child(
        """
        program = native.Program(k.device, [k.dispatch("slow", [(0, b, 0)], 3_000_000, groups=8, threads=128)])
        state = k.device.buffer(152)
        state.fill(0)
        loop = native.DecodeLoop(program, state)
        loop.start(5)
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("settings", ["order=random,seed=2", "order=reverse", "strict=1", "workers=1"])
def test_settings_do_not_change_a_right_program(settings: str) -> None:
    if native.live_objects() is None:
        pytest.skip("software Metal only")
    result = child(
        """
        from tests.native.test_program import chain, chain_result, words
        words(b)[:] = 9
        native.Program(k.device, chain(k, b)).run()
        assert (words(b)[:64] == chain_result(9)).all()
        """,
        LILY_METAL_HOST=settings,
    )
    assert result.returncode == 0, result.stderr


def test_unbound_buffer_aborts_with_the_parameter_name() -> None:
    if native.live_objects() is None:
        pytest.skip("software Metal only")
    result = child('k.device.run_once([k.dispatch("add_one", [], 8)])')
    assert result.returncode == -signal.SIGABRT
    assert "Metal: add_one: buffer 0 (x) is not bound" in result.stderr
