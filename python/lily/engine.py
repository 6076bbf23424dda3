"""A loaded model on a device: resident weights, small tensors, scratch memory and the plans' inputs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .config import ModelConfig
from .errors import DeviceError
from .gpu import Gpu
from .host_routing import HostRoutedProgram
from .memory import MemoryPlan
from .options import ExecutionOptions
from .plans.context import PlanContext, aligned, session_state_bytes, weight_region
from .plans.geometry import ROPE_LO_ROWS
from .policy import THRESHOLDS
from .prefix_cache import PrefixCache
from .reading import Bytes
from .schedule import HOST, Dispatch, Region
from .snapshot_store import SnapshotStore
from .weight_layout import Group, Part

if TYPE_CHECKING:
    from .session import Session


class WeightSource(Protocol):
    """Where weights come from: a `Checkpoint`, or made up ones (`bench.random_weights`)."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def total_bytes(self) -> int: ...
    def layout(self) -> list[Group]: ...
    def load_group(self, group: Group, weights: Bytes, scales: Bytes | None = None, biases: Bytes | None = None) -> None: ...
    def plain_names(self) -> list[str]: ...
    def plain(self, name: str) -> np.ndarray: ...
    def fingerprint(self) -> str: ...


def rope_tables(config: ModelConfig, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) tables of two levels, float32 [rows, rotary_dim / 2, 2], computed in float64.

    Position p = hi * ROPE_LO_ROWS + lo; the kernel joins both by angle addition, which keeps float32 accuracy at any
    position without a sine of a large argument and without a table of `positions` rows.
    """
    half = config.rotary_dim // 2
    inverse = config.rope_theta ** (-2.0 * np.arange(half) / config.rotary_dim)

    def table(at: np.ndarray) -> np.ndarray:
        angle = at[:, None].astype(np.float64) * inverse
        return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)

    rows = -(-positions // ROPE_LO_ROWS)
    return table(np.arange(ROPE_LO_ROWS)), table(np.arange(rows) * ROPE_LO_ROWS)


class Engine:
    """Weights on a device. One resident copy: tensors are read from the file straight into the device's buffers.

    context: tokens a session may hold; None = the model's limit, clamped to what fits. cache_bytes: of the prefix cache, None =
    a share of what is left. What does not fit is refused with the numbers before anything is allocated (case 38).
    """

    def __init__(self, checkpoint: WeightSource, gpu: Gpu, *, context: int | None = None, cache_bytes: int | None = None) -> None:
        self.gpu = gpu
        self.config: ModelConfig = checkpoint.config
        self.fingerprint = checkpoint.fingerprint()
        self.groups: dict[str, Group] = {}
        self.buffers: dict[str, Any] = {}
        self.plain_bytes: dict[str, int] = {}
        self._arena_bytes = 0
        for group in checkpoint.layout():
            self.groups[group.name] = group
        plan = self._memory_plan(checkpoint.total_bytes)
        self.context_length = plan.context(context, self.config.max_position, cache_bytes)
        self.cache = PrefixCache(SnapshotStore(gpu, self.config), plan.cache(cache_bytes, self.context_length), self._cache_room)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._sessions_lock = threading.Lock()
        self._load_groups(checkpoint)
        self._load_plain(checkpoint)

    # -- loading ---------------------------------------------------------------------------------------------------------
    def _memory_plan(self, weights: int, capacity: int | None = None) -> MemoryPlan:
        rows = min(THRESHOLDS.chunk_rows, capacity or self.config.max_position)
        scratch = self.context("prefill", rows, rows, rows, 1, ExecutionOptions()).arena_bytes()
        one, two = (sum(session_state_bytes(self.config, n).values()) for n in (1, 2))
        return MemoryPlan(self.gpu.name, self.gpu.capabilities.working_set, weights, max(self._arena_bytes, scratch), one - (two - one), two - one)

    def _load_groups(self, checkpoint: WeightSource) -> None:
        parts: tuple[Part, ...] = ("weight", "scales", "biases")
        groups = checkpoint.layout()
        regions = {group.name: [weight_region(group, part) for part in parts] for group in groups}
        window = None  # where the CPU does not see the weights' memory, a group is read into this and copied from there
        if not self.gpu.capabilities.unified_memory:
            window = self.gpu.host_buffer(max(sum(aligned(r.nbytes) for r in group) for group in regions.values()), "weights on their way")
        for group in groups:
            views: list[Any] = []
            copies: list[tuple[Any, int, Any, int, int]] = []
            at = 0
            for region in regions[group.name]:
                if region.nbytes == 0:
                    views.append(None)
                    continue
                buffer = self.gpu.buffer(region.nbytes, region.buffer, tracked=False)
                self.buffers[region.buffer] = buffer
                views.append((buffer.view() if window is None else window.view()[at:])[: region.nbytes])
                copies.append((window, at, buffer, 0, -(-region.nbytes // 4) * 4))
                at += aligned(region.nbytes)
            checkpoint.load_group(group, *views)
            if window is not None:
                self.gpu.native.blit(copies)

    def _load_plain(self, checkpoint: WeightSource) -> None:
        """Small tensors (norms, convolution, gates, RoPE tables), float32, in one buffer each."""
        tensors = {name: checkpoint.plain(name) for name in checkpoint.plain_names()}
        tensors["rope_lo"], tensors["rope_hi"] = rope_tables(self.config, self.config.max_position)
        for name, value in tensors.items():
            data = np.ascontiguousarray(value, dtype=np.float32)
            buffer = self.gpu.buffer(data.nbytes, f"p:{name}", tracked=False)
            self.gpu.write(buffer, data)
            self.buffers[f"p:{name}"] = buffer
            self.plain_bytes[name] = data.nbytes

    # -- plans -----------------------------------------------------------------------------------------------------------
    def context(self, phase: str, rows: int, context: int, capacity: int, head_rows: int, options: ExecutionOptions) -> PlanContext:
        return PlanContext(self.config, self.groups, self.plain_bytes, phase, rows, context, capacity, head_rows, options, self.gpu.capabilities)

    def arena(self, nbytes: int) -> Any:
        """Scratch memory of at least `nbytes`; grows in steps, so that few sizes ever exist."""
        if nbytes > self._arena_bytes:
            size = 1 << (nbytes - 1).bit_length() if nbytes < 64 << 20 else -(-nbytes // (64 << 20)) * (64 << 20)
            self._arena_bytes = size
            self.buffers["arena"] = self.gpu.buffer(size, "arena")
        return self.buffers["arena"]

    def record(self, plan: Sequence[Dispatch], state: Mapping[str, Any], options: ExecutionOptions) -> Any:
        """A plan as something with `run()`: one native program, or several around the CPU's steps (P2's control)."""
        buffers = buffer_map(self, state)
        if any(d.family == HOST for d in plan):
            return HostRoutedProgram(self, plan, buffers, options.concurrent_pass)
        return self.gpu.record(plan, buffers, concurrent=options.concurrent_pass)

    def read(self, region: Region) -> np.ndarray:
        """A copy of a region of the engine's own buffers (the arena), as bytes."""
        return self.gpu.read(self.buffers[region.buffer], region.offset, region.nbytes)

    def write(self, region: Region, data: np.ndarray) -> None:
        """Puts `data` at the start of a region of the engine's own buffers. Nothing may be running."""
        assert data.nbytes <= region.nbytes, f"{data.nbytes} bytes for a region of {region.nbytes}"
        self.gpu.write(self.buffers[region.buffer], data, region.offset)

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes by use: weights (with small tensors) and scratch."""
        weights = sum(g.weight_bytes + 2 * g.scale_bytes for g in self.groups.values()) + sum(self.plain_bytes.values())
        return {"weights": weights, "scratch": self._arena_bytes}

    def register(self, session: Session) -> None:
        """Counts a session's memory as long as it lives."""
        with self._sessions_lock:
            self._sessions.add(session)

    def close(self) -> None:
        """Frees the weights, the cache and the state of every session. Nothing may be running, and nothing works afterwards."""
        self.cache.clear()
        with self._sessions_lock:
            for session in self._sessions:
                session.release()
        self.buffers.clear()

    def check_fits(self, capacity: int, session: Session) -> None:
        """Makes room for a session that grows to `capacity` KV rows: snapshots are evicted where needed. Raises DeviceError with
        the numbers when it does not fit beside the weights and the other sessions (case 38)."""
        plan = self._memory_plan(self.memory_bytes()["weights"], capacity)
        others = self._session_bytes(session)
        room = plan.limit - plan.needed(capacity, 0, others)
        if room < 0:
            raise plan.refusal(capacity, 0, others)
        self.cache.shrink(room)

    def _session_bytes(self, but: Session | None = None) -> int:
        with self._sessions_lock:
            return sum(s.memory_bytes() for s in self._sessions if s is not but)

    def _cache_room(self) -> int:
        memory = self.memory_bytes()
        return self.gpu.capabilities.working_set - memory["weights"] - memory["scratch"] - self._session_bytes()


def buffer_map(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """Every buffer name of a plan resolved: the engine's and a session's."""
    return {**engine.buffers, **state}

