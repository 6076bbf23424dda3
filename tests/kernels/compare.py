"""Runs a kernel and its numpy reference on copies of the same buffers and compares what both left behind."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.kernels.harness import run
from tests.reference.numbers import f64


def assert_close(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float, what: str = "") -> None:
    """Integers equal; bf16 and f32 within rtol and atol (absolute, relative to the expected array's RMS)."""
    if actual.dtype in (np.uint32, np.uint64):
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    a, e = f64(actual), f64(expected)
    rms = np.sqrt(np.mean(np.square(e[np.isfinite(e)]))) if np.isfinite(e).any() else 0.0
    np.testing.assert_allclose(a, e, rtol=rtol, atol=atol * rms, err_msg=what)


def check(
    family: str,
    function: str,
    reference: Callable,
    buffers: Sequence[np.ndarray],
    args: tuple[str, Mapping],
    grid: tuple[int, ...],
    threads: int,
    rtol: float = 2**-7,  # one unit of bf16: a sum on the edge may round the other way
    atol: float = 2**-12,
    constants: Mapping | None = None,
    args_index: int | None = None,
) -> list[np.ndarray]:
    """Buffers in index order, with args_index (default: after the last buffer) left out. Returns what the kernel wrote."""
    args_index = len(buffers) if args_index is None else args_index
    index = [i for i in range(len(buffers) + 1) if i != args_index]
    actual, expected = [b.copy() for b in buffers], [b.copy() for b in buffers]
    grid = (*grid, 1, 1)[:3]
    run(family, function, dict(zip(index, actual)), args, args_index, grid, (threads, 1, 1), constants or {})
    reference(*expected, args[1])
    for i, a, e in zip(index, actual, expected):
        assert_close(a, e, rtol, atol, f"{function} buffer {i}")
    return actual


def team_switches(blocks: int = 1, prefetch: bool = False) -> dict[int, tuple[str, bool | int]] | None:
    """Function constants of metal/team_gemv.h: kLaneBlocksSwitch and kPrefetchSwitch where they are not the default."""
    out: dict[int, tuple[str, bool | int]] = {2: ("uint", blocks)} if blocks != 1 else {}
    return (out | ({3: ("bool", True)} if prefetch else {})) or None
