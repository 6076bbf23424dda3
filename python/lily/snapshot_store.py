"""Snapshots of sessions in GPU memory: every capture and every restore is one command buffer of copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .config import ModelConfig
from .gpu import Gpu
from .plans.context import session_state_bytes
from .prefix_cache import Block, Segment

if TYPE_CHECKING:
    from .session import Session

RING = 3  # slots of the convolution and GDN rings


class SnapshotStore:
    """A block holds the rows of one KV buffer after the other's; a state one slot of every ring, one after the other."""

    def __init__(self, gpu: Gpu, config: ModelConfig) -> None:
        self._gpu = gpu
        sizes = session_state_bytes(config, 1)
        self.kv = [name for name in sizes if name.startswith("kv_")]
        self.slots = {name: nbytes // RING for name, nbytes in sizes.items() if not name.startswith("kv_")}
        self.kv_row = next((sizes[name] for name in self.kv), 0)  # every KV buffer has the same rows
        self.row_bytes = self.kv_row * len(self.kv)
        self.state_bytes = sum(self.slots.values())

    def _buffer(self, nbytes: int, label: str) -> Any:
        # The CPU never looks inside.
        return self._gpu.native.buffer(max(nbytes, 16), "private", label, True)

    def capture(self, holder: Session, first: int) -> tuple[Block | None, Any]:
        """See `prefix_cache.Store`."""
        rows = len(holder.tokens) - first
        copies = []
        block = None
        if rows:
            nbytes = rows * self.row_bytes
            block = Block(rows, nbytes, self._buffer(nbytes, "cached rows"))
            for i, name in enumerate(self.kv):
                copies.append((holder.buffers[name], first * self.kv_row, block.data, i * rows * self.kv_row, rows * self.kv_row))
        state, at = self._buffer(self.state_bytes, "cached state"), 0
        for name, nbytes in self.slots.items():
            copies.append((holder.buffers[name], holder.slot * nbytes, state, at, nbytes))
            at += nbytes
        self._gpu.native.blit(copies)
        return block, state

    def merge(self, segments: Sequence[Segment]) -> Block:
        """See `prefix_cache.Store`."""
        rows = sum(s.rows for s in segments)
        block = Block(rows, rows * self.row_bytes, self._buffer(rows * self.row_bytes, "cached rows"))
        copies, row = [], 0
        for s in segments:
            for i in range(len(self.kv)):
                source = (i * s.block.rows + s.first) * self.kv_row
                copies.append((s.block.data, source, block.data, (i * rows + row) * self.kv_row, s.rows * self.kv_row))
            row += s.rows
        self._gpu.native.blit(copies)
        return block

    def restore(self, holder: Session, segments: Sequence[Segment], skip: int, state: Any) -> None:
        """See `prefix_cache.Store`. The state goes into slot 0 of the rings."""
        copies, row = [], 0
        for s in segments:
            drop = min(max(0, skip - row), s.rows)
            for i, name in enumerate(self.kv):
                source = (i * s.block.rows + s.first + drop) * self.kv_row
                copies.append((s.block.data, source, holder.buffers[name], (row + drop) * self.kv_row, (s.rows - drop) * self.kv_row))
            row += s.rows
        at = 0
        for name, nbytes in self.slots.items():
            copies.append((state, at, holder.buffers[name], 0, nbytes))
            at += nbytes
        self._gpu.native.blit(copies)
