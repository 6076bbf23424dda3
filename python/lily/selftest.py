"""Kernel self-tests for `lily doctor`: a few kernels on random data against numpy, outputs poisoned first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _native
from .checkpoint import bf16_to_f32
from .errors import LilyError
from .kernel_args import structs
from .plans import geometry as geo
from .policy import APPLE, TUNING, tensor_family

if TYPE_CHECKING:
    from .gpu import Gpu


@dataclass(frozen=True)
class Check:
    """Outcome of one self-test: relative RMS error and the bound it must stay under."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return bool(np.isfinite(self.error)) and self.error <= self.bound


def _bf16(x: np.ndarray) -> np.ndarray:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def _relative(out: np.ndarray, reference: np.ndarray) -> float:
    if not np.isfinite(out).all():
        return float("nan")
    return float(np.sqrt(((out - reference) ** 2).mean() / (reference**2).mean()))


def _run(gpu: Gpu, family: str, function: str, arrays: dict[int, np.ndarray], struct: str, args: dict[str, float | int], index: int,
         grid: tuple[int, int, int], threads: int) -> None:
    buffers = {}
    for i, a in arrays.items():
        buffers[i] = gpu.buffer(a.nbytes, f"{function}[{i}]")
        gpu.write(buffers[i], a)
    dispatch: _native.Dispatch = (gpu.pipeline(family, function, threads=threads), [(i, b, 0) for i, b in buffers.items()], structs()[struct].pack(args), index,
                grid, (threads, 1, 1), False, 0.0, function, [])
    _native.Program(gpu.native, [dispatch], True).run()
    for i, a in arrays.items():
        a.reshape(-1).view(np.uint8)[:] = gpu.read(buffers[i], 0, a.nbytes)


def _quantised(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    words = rng.integers(0, 1 << 32, (n, k // 8), dtype=np.uint32)
    scales, biases = _bf16(rng.normal(0, 0.02, (n, k // 64))), _bf16(rng.normal(0, 0.1, (n, k // 64)))
    q = np.stack([(words >> (4 * j)) & 15 for j in range(8)], -1).reshape(n, k).astype(np.float32)
    dense = q * np.repeat(bf16_to_f32(scales), 64, 1) + np.repeat(bf16_to_f32(biases), 64, 1)
    return words, scales, biases, dense


def _poison(*shape: int) -> np.ndarray:
    return np.full(shape, 0xFFFF, np.uint16)


def _gemv(gpu: Gpu, rng: np.random.Generator) -> float:
    n, k = 200, 512
    words, scales, biases, dense = _quantised(rng, n, k)
    x, y = _bf16(rng.normal(size=(1, k))), _poison(1, n)
    threads, groups = geo.gemv(n, k, APPLE)
    _run(gpu, "gemv", "gemv_bf16_b4_g64", {0: words, 1: scales, 2: biases, 3: x, 4: y}, "GemvArgs", {"rows": 1, "n": n, "k": k, "ldx": k, "ldy": n}, 5,
         (groups, 1, 1), threads)
    return _relative(bf16_to_f32(y), bf16_to_f32(x) @ dense.T)


def _product(gpu: Gpu, rng: np.random.Generator, family: str, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """A dense product of `family` in tiles of `tile` rows, and numpy's."""
    rows, n, k = 37, 200, 512
    words, scales, biases, dense = _quantised(rng, n, k)
    x, y = _bf16(rng.normal(size=(rows, k))), _poison(rows, n)
    args: dict[str, float | int] = {"rows": rows, "n": n, "k": k, "ldx": k, "ldy": n}
    _run(gpu, family, f"{family}_bf16_b4_g64_m{tile}", {0: words, 1: scales, 2: biases, 3: x, 4: y}, "GemmArgs", args, 5,
         (-(-n // geo.tile_columns(tile, family)), -(-rows // tile), 1), geo.tile_threads(family))
    return bf16_to_f32(y), bf16_to_f32(x) @ dense.T


def _grouped_product(gpu: Gpu, rng: np.random.Generator, family: str, tile: int) -> np.ndarray:
    """Rows of two experts, the tile of the second not full."""
    n, k, rows = 72, 256, tile + 5
    words, scales, biases, _ = _quantised(rng, 2 * n, k)
    x, y = _bf16(rng.normal(size=(rows, k))), _poison(rows, n)
    blocks = np.array([[0, 0, tile, 0], [1, tile, 5, 0]], np.uint32)
    args: dict[str, float | int] = {"n": n, "k": k, "ldx": k, "ldy": n, "gather_slots": 0, "experts": 2}
    arrays = {0: words, 1: scales, 2: biases, 3: x, 4: y, 6: blocks, 7: np.arange(rows, dtype=np.uint32)}
    _run(gpu, family, f"{family}_bf16_b4_g64_m{tile}", arrays, "GroupedGemmArgs", args, 5, (-(-n // geo.tile_columns(tile, family)), 2, 1), geo.tile_threads(family))
    return bf16_to_f32(y)


def _gemm(gpu: Gpu, rng: np.random.Generator) -> float:
    return _relative(*_product(gpu, rng, "gemm", 32))


TENSOR_BOUND = 5e-3  # relative RMS between the two units: both round to bf16 at the end


def tensor_problem(gpu: Gpu, seed: int = 0) -> str:
    """P6: runs every tile height on tensor operations and on simdgroup matrices. Empty when both agree, else what is wrong."""
    dense, grouped = (tensor_family(family, TUNING.get(gpu.kind, APPLE)) for family in ("gemm", "grouped_gemm"))
    try:
        new, old = (_product(gpu, np.random.default_rng(seed), family, tile)[0] for family, tile in ((dense, 64), ("gemm", 32)))
        found = {f"{dense}_m64": _relative(new, old)}
        for tile in (16, 32):
            new, old = (_grouped_product(gpu, np.random.default_rng(seed), family, tile) for family in (grouped, "grouped_gemm"))
            found[f"{grouped}_m{tile}"] = _relative(new, old)
    except LilyError as caught:
        return f"tensor operations failed: {caught}"
    wrong = [f"{name} by {error:.1e}" for name, error in found.items() if not error <= TENSOR_BOUND]
    return f"tensor operations disagree with simdgroup matrices (bound {TENSOR_BOUND:.0e}): {', '.join(wrong)}" if wrong else ""


def _rmsnorm(gpu: Gpu, rng: np.random.Generator) -> float:
    x, w, y = _bf16(rng.normal(size=(3, 2048))), rng.normal(1, 0.1, 2048).astype(np.float32), _poison(3, 2048)
    _run(gpu, "norm", "rmsnorm", {0: x, 1: w, 2: y}, "NormArgs", {"rows": 3, "n": 2048, "eps": 1e-6}, 3, (3, 1, 1), geo.norm_threads(2048))
    f = bf16_to_f32(x)
    return _relative(bf16_to_f32(y), f / np.sqrt((f * f).mean(-1, keepdims=True) + 1e-6) * w)


CHECKS: dict[str, tuple[Callable[[Gpu, np.random.Generator], float], float]] = {
    "gemv_bf16_b4_g64": (_gemv, 5e-3),
    "gemm_bf16_b4_g64": (_gemm, 5e-3),
    "rmsnorm": (_rmsnorm, 5e-3),
}


def run_checks(gpu: Gpu, seed: int = 0) -> list[Check]:
    """Runs every check; a check whose launch fails raises DeviceError."""
    out = []
    for name, (function, bound) in CHECKS.items():
        out.append(Check(name, function(gpu, np.random.default_rng(seed)), bound))
    return out


def report(checks: list[Check]) -> list[dict[str, Any]]:
    return [{"name": c.name, "relative_rms": c.error, "bound": c.bound, "passed": c.passed} for c in checks]
