"""Runs one kernel on the default device: arrays in, the same arrays changed in place.

bfloat16 has no numpy type: such arrays are uint16 holding the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from lily.gpu import Gpu
from lily.kernel_args import structs
from tests.conftest import chosen_device


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 bits, rounded to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def f32(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits → float32."""
    return (np.asarray(x).astype(np.uint32) << 16).view(np.float32)


def poison(shape: int | tuple[int, ...], dtype: type) -> np.ndarray:
    """An output array that is NaN (or all ones for integers) until written."""
    out = np.empty(shape, dtype)
    out.view(np.uint8).reshape(-1)[:] = 0xFF
    return out


@cache
def device() -> Gpu:
    return Gpu(chosen_device())


def run(
    family: str,
    function: str,
    buffers: Mapping[int, np.ndarray | None],
    args: tuple[str, Mapping[str, float | int]],
    args_index: int,
    grid: tuple[int, int, int],
    threads: tuple[int, int, int],
    constants: Mapping[int, tuple[str, float | int | bool]] | None = None,
) -> None:
    """Dispatches `grid` threadgroups of `threads`. Buffers hold exactly the arrays' bytes, so an overrun is found."""
    from lily import _native

    gpu = device()
    count = threads[0] * threads[1] * threads[2]
    pipeline = gpu.pipeline(family, function, tuple((i, t, v) for i, (t, v) in (constants or {}).items()), count)
    bound = {i: a for i, a in buffers.items() if a is not None}
    native = {i: gpu.native.buffer(max(a.nbytes, 4), "shared", f"{function}[{i}]", True) for i, a in bound.items()}
    for i, a in bound.items():
        native[i].view()[: a.nbytes] = np.ascontiguousarray(a).view(np.uint8).reshape(-1)
    packed = structs()[args[0]].pack(args[1])
    dispatch = (pipeline, [(i, b, 0) for i, b in native.items()], packed, args_index, tuple(grid), tuple(threads), False, 0.0, function, [])
    _native.Program(gpu.native, [dispatch], True).run()
    for i, a in bound.items():
        a.reshape(-1).view(np.uint8)[:] = native[i].view()[: a.nbytes]
