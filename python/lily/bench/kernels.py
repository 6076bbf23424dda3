"""`lily bench --probe`: each kernel of a plan alone, against the rate at which the device reads the same bytes with the arithmetic
removed, and its matrix work against the matrix limit.

The launches of one kernel are run as the plan has them, one after another with their barriers, on the buffers that a full
pass left: every layer's weights are others, so caches help no more than in the plan. A launch's time holds its start and end.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..engine import buffer_map
from ..plan_report import dram_bytes
from ..policy import chunk_size
from ..schedule import Binding, Dispatch
from .limits import Limits, Probe
from .speed import Speed

ROUNDS = 5
HEAVY_BYTES = 1 << 20
WIDE = (2048, 256)  # threadgroups and threads of the second shape that reads are tried with


@dataclass(frozen=True)
class KernelRow:
    """All launches of a kernel in a plan. `seconds`: of all of them; `bytes`: of weights and state that they move; `read_seconds`: for
    reading as many bytes, where that is over a megabyte a launch; `share`: read_seconds / seconds; `operations`: of matrix tiles."""

    kernel: str
    launches: int
    seconds: float
    bytes: int
    read_seconds: float | None
    operations: int
    copy_share: float
    matrix_share: float

    @property
    def share(self) -> float | None:
        return None if self.read_seconds is None else self.read_seconds / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


def measure_kernels(speed: Speed, phase: str, length: int, limits: Limits) -> tuple[list[KernelRow], float]:
    """(rows, heaviest first; seconds of the whole pass on the GPU's clock) of the decode step at `length` keys, or the last
    chunk of a prompt of `length`."""
    engine, session = speed.engine, speed.session
    speed.fill(length if phase == "decode" else max(1, length - chunk_size(length, None)))
    plan = speed.plan(phase, length)
    engine.arena(max(b.region.offset + b.region.nbytes for d in plan for b in d.bindings if b.region.buffer == "arena"))
    buffers = buffer_map(engine, session.buffers)

    def seconds_of(dispatches: list[Dispatch]) -> float:
        program = engine.gpu.record(dispatches, buffers)
        times: list[float] = []
        for _ in range(1 + ROUNDS):
            session.place_step()
            times.append(program.run(1e9)["gpu_ms"] / 1e3)
        return statistics.median(times[1:])

    whole = seconds_of(plan)
    probe = Probe(engine.gpu)
    by_kernel: dict[str, list[Dispatch]] = {}
    for d in plan:
        by_kernel.setdefault(re.sub("_m[0-9]+$", "", d.function), []).append(d)  # P3's two lists are one product
    rows = []
    for kernel, launches in by_kernel.items():
        seconds, moved, operations = seconds_of(launches), sum(map(dram_bytes, launches)), 2 * sum(d.macs for d in launches)
        rows.append(KernelRow(kernel, len(launches), seconds, moved, _reading(probe, launches, buffers), operations,
                              moved / seconds / limits.copy, operations / seconds / limits.matrix))
    return sorted(rows, key=lambda r: -r.seconds), whole


def _reading(probe: Probe, launches: Sequence[Dispatch], buffers: dict[str, Any]) -> float | None:
    """Seconds to read each launch's largest weight or state region, scaled to all its bytes; the better of the launch's own
    shape and a wide one."""
    heavy = [(d, max(d.bindings, key=_moved)) for d in launches if dram_bytes(d) >= HEAVY_BYTES]
    if len(heavy) < len(launches):
        return None
    places = [(buffers[b.region.buffer], b.region.offset, min(dram_bytes(d), b.region.nbytes) // 16 * 16) for d, b in heavy]
    first = launches[0]
    shapes = ((first.threadgroups, min(first.threads[0], 1024)), WIDE)
    seconds = min(probe.read_seconds(places, *shape) for shape in shapes) * len(places)
    return seconds * sum(map(dram_bytes, launches)) / sum(nbytes for _, _, nbytes in places)


def _moved(b: Binding) -> int:
    return b.moved if b.region.buffer != "arena" else 0
