"""What the device does at best: copy rate, read rate, matrix rate. Measured with `metal/probe.metal`, never assumed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _native
from ..gpu import Gpu
from ..kernel_args import structs

MATRIX_THREADS = 128
MATRIX_OPERATIONS = 2 * 8 * 8 * 8 * 16  # of a simdgroup's round in probe_matrix
COPY_SHAPES = ((64, 256), (512, 256), (2048, 256), (4096, 512), (1024, 1024))  # threadgroups, threads: the best one counts
ROUNDS = 5


@dataclass(frozen=True)
class Limits:
    """Bytes per second that a copy reads and writes together, bytes per second of reading alone, bf16 operations per second
    of `simdgroup_matrix` products that stay in registers."""

    copy: float
    read: float
    matrix: float


class Probe:
    """Launches of the probe kernels on one device."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._out = gpu.buffer(64 << 20, "probe.out")

    def run(self, launches: Sequence[tuple[str, Sequence[tuple[int, Any, int]], int, int, int]]) -> float:
        """Median GPU seconds of (function, bindings, count, threadgroups, threads) launches one after another, for each."""
        program = self.program(launches)
        program.run(1e9)
        times: list[float] = [program.run(1e9)["gpu_ms"] for _ in range(ROUNDS)]
        return statistics.median(times) / 1e3 / len(launches)

    def program(self, launches: Sequence[tuple[str, Sequence[tuple[int, Any, int]], int, int, int]]) -> Any:
        layout = structs()["ProbeArgs"]
        native: list[_native.Dispatch] = [
            (self.gpu.pipeline("probe", function, threads=threads), list(bindings), layout.pack({"count": count}), 2, (groups, 1, 1), (threads, 1, 1), i > 0, 0.0,
             function, []) for i, (function, bindings, count, groups, threads) in enumerate(launches)]
        return _native.Program(self.gpu.native, native, True)

    def read_seconds(self, places: Sequence[tuple[Any, int, int]], groups: int, threads: int) -> float:
        """Seconds for a launch that reads `nbytes` at `offset` of a buffer; `places` = (buffer, offset, nbytes) of successive launches."""
        threads = max(32, threads // 32 * 32)
        launches = [("probe_read", [(0, buffer, offset), (1, self._out, 0)], nbytes // 16, groups, threads) for buffer, offset, nbytes in places]
        return self.run(launches)

    def limits(self, nbytes: int | None = None) -> Limits:
        """Rates over `nbytes` (by default 1 GiB, or a 32nd of the device's working set where that is less), random content."""
        size = nbytes if nbytes is not None else min(1 << 30, self.gpu.capabilities.working_set // 32) // 4096 * 4096
        source, target = self.gpu.buffer(size, "probe.source"), self.gpu.buffer(size, "probe.target")
        block = np.random.default_rng(0).integers(0, 256, min(size, 64 << 20), np.uint8)
        for at in range(0, size, block.nbytes):
            self.gpu.write(source, block[: size - at], at)
        copy = min(self.run([("probe_copy", [(0, source, 0), (1, target, 0)], size // 16, g, t)]) for g, t in COPY_SHAPES)
        read = min(self.read_seconds([(source, 0, size)], g, t) for g, t in COPY_SHAPES)
        return Limits(2 * size / copy, size / read, self._matrix_rate(source))

    def _matrix_rate(self, source: Any) -> float:
        """Rounds are doubled until a launch takes 5 ms; threadgroups are enough for any GPU this is made for."""
        data = np.random.default_rng(1).normal(0, 1e-3, 512).astype(np.float32)
        self.gpu.write(source, (data.view(np.uint32) >> 16).astype(np.uint16))
        groups, best, rounds = 1024, 0.0, 64
        while True:
            seconds = self.run([("probe_matrix", [(0, source, 0), (1, self._out, 0)], rounds, groups, MATRIX_THREADS)])
            best = max(best, MATRIX_OPERATIONS * rounds * groups * (MATRIX_THREADS // 32) / seconds)
            if seconds > 5e-3:
                return best
            rounds *= 4
