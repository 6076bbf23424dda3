"""The control of P2: the CPU inspects the routing between two programs and builds the lists of routing.metal itself.

Every layer of a chunk then waits for the GPU, reads the chosen experts and submits the rest, as engines do that keep
their expert lists on the CPU. The lists are the same bytes as `route_plan`'s, so the answer is too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .schedule import HOST, Dispatch

if TYPE_CHECKING:
    from .engine import Engine

NO_EXPERT = 0xFFFFFFFF  # block map entries past the last block


def route_lists(expert_ids: np.ndarray, experts: int, tile: int, max_blocks: int, tail_tile: int = 0, max_tail: int = 0) -> dict[str, np.ndarray]:
    """The lists of a grouped GEMM, uint32: offsets [experts + 1], sorted_rows and row_pos [total], block_map [max_blocks, 4],
    tail_map [max_tail, 4] of {expert, first sorted row, rows, 0}. `expert_ids` [total] is the expert of every (row, slot)."""
    order = np.argsort(expert_ids, kind="stable").astype(np.uint32)
    position = np.empty_like(order)
    position[order] = np.arange(len(order), dtype=np.uint32)
    counts = np.bincount(expert_ids, minlength=experts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    blocks: list[tuple[int, int, int, int]] = []
    tails: list[tuple[int, int, int, int]] = []
    for expert in np.flatnonzero(counts):
        first, rows = int(offsets[expert]), int(counts[expert])
        for at in range(0, rows, tile):
            size = min(tile, rows - at)
            (tails if size < tile and size <= tail_tile else blocks).append((int(expert), first + at, size, 0))
    return {"offsets": offsets, "sorted_rows": order, "row_pos": position, "block_map": _padded(blocks, max_blocks), "tail_map": _padded(tails, max_tail)}


def _padded(entries: Sequence[tuple[int, int, int, int]], size: int) -> np.ndarray:
    out = np.zeros((size, 4), np.uint32)
    out[:, 0] = NO_EXPERT
    if entries:
        out[: len(entries)] = entries
    return out


class HostRoutedProgram:
    """A plan cut at its host steps: runs each part to its end on the GPU and the routing between them on the CPU."""

    def __init__(self, engine: Engine, plan: Sequence[Dispatch], buffers: dict[str, Any], concurrent: bool) -> None:
        self._engine = engine
        self._steps: list[Any] = []
        part: list[Dispatch] = []
        for d in plan:
            if d.family != HOST:
                part.append(d)
                continue
            self._steps += [engine.gpu.record(part, buffers, concurrent=concurrent), d]
            part = []
        self._steps.append(engine.gpu.record(part, buffers, concurrent=concurrent))

    def run(self) -> None:
        """Raises DeviceError for a failed command buffer."""
        for step in self._steps:
            if isinstance(step, Dispatch):
                self._route(step)
            else:
                step.run()

    def _route(self, d: Dispatch) -> None:
        a = {name: int(value) for name, value in d.args}
        regions = {b.index: b.region for b in d.bindings}
        ids = self._engine.read(regions[0]).view(np.uint32)[: a["total"]]
        lists = route_lists(ids, a["experts"], a["tile"], a["max_blocks"], a.get("tail_tile", 0), a.get("max_tail", 0))
        for index, name in ((1, "offsets"), (2, "sorted_rows"), (3, "row_pos"), (4, "block_map"), (6, "tail_map")):
            if index in regions:
                self._engine.write(regions[index], lists[name])
