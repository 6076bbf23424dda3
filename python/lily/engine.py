"""A loaded model on a device: resident weights, small tensors, scratch memory and the plans' inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .config import ModelConfig
from .errors import DeviceError
from .gpu import Gpu
from .host_routing import HostRoutedProgram
from .options import ExecutionOptions
from .plans.context import PlanContext, session_state_bytes, weight_region
from .plans.geometry import ROPE_LO_ROWS
from .policy import THRESHOLDS
from .schedule import HOST, Dispatch, Region
from .weight_layout import Group, Part

GIB = 1 << 30


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
    """Weights on a device. One resident copy: tensors are read from the file straight into the device's buffers."""

    def __init__(self, checkpoint: Checkpoint, gpu: Gpu) -> None:
        self.gpu = gpu
        self.config: ModelConfig = checkpoint.config
        self.fingerprint = checkpoint.fingerprint()
        self.groups: dict[str, Group] = {}
        self.buffers: dict[str, Any] = {}
        self.plain_bytes: dict[str, int] = {}
        self._arena_bytes = 0
        self._preflight(checkpoint)
        self._load_groups(checkpoint)
        self._load_plain(checkpoint)

    # -- loading ---------------------------------------------------------------------------------------------------------
    def _preflight(self, checkpoint: Checkpoint) -> None:
        limit = self.gpu.capabilities.working_set
        if checkpoint.total_bytes > limit:
            raise DeviceError(
                f"the weights need {checkpoint.total_bytes / GIB:.1f} GiB, {self.gpu.name} offers {limit / GIB:.1f} GiB",
                fix="use a machine with more memory, or raise the limit (sysctl iogpu.wired_limit_mb on a Mac)",
            )

    def _load_groups(self, checkpoint: Checkpoint) -> None:
        parts: tuple[Part, ...] = ("weight", "scales", "biases")
        for group in checkpoint.layout():
            self.groups[group.name] = group
            views: list[Any] = []
            for part in parts:
                region = weight_region(group, part)
                if region.nbytes == 0:
                    views.append(None)
                    continue
                buffer = self.gpu.buffer(region.nbytes, region.buffer, tracked=False)
                self.buffers[region.buffer] = buffer
                views.append(buffer.view()[: region.nbytes])
            checkpoint.load_group(group, *views)

    def _load_plain(self, checkpoint: Checkpoint) -> None:
        """Small tensors (norms, convolution, gates, RoPE tables), float32, in one buffer each."""
        tensors = {name: checkpoint.plain(name) for name in checkpoint.plain_names()}
        tensors["rope_lo"], tensors["rope_hi"] = rope_tables(self.config, self.config.max_position)
        for name, value in tensors.items():
            data = np.ascontiguousarray(value, dtype=np.float32)
            buffer = self.gpu.buffer(data.nbytes, f"p:{name}", tracked=False)
            buffer.view()[: data.nbytes] = data.view(np.uint8).reshape(-1)
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
        data: np.ndarray = self.buffers[region.buffer].view()[region.offset : region.offset + region.nbytes].copy()
        return data

    def write(self, region: Region, data: np.ndarray) -> None:
        """Puts `data` at the start of a region of the engine's own buffers. Nothing may be running."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        assert raw.nbytes <= region.nbytes, f"{raw.nbytes} bytes for a region of {region.nbytes}"
        self.buffers[region.buffer].view()[region.offset : region.offset + raw.nbytes] = raw

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes by use: weights (with small tensors) and scratch."""
        weights = sum(g.weight_bytes + 2 * g.scale_bytes for g in self.groups.values()) + sum(self.plain_bytes.values())
        return {"weights": weights, "scratch": self._arena_bytes}

    def check_fits(self, capacity: int) -> None:
        """Refuses a KV capacity that does not fit beside the weights, with the numbers (case 38)."""
        state = sum(session_state_bytes(self.config, capacity).values())
        weights, limit = self.memory_bytes()["weights"], self.gpu.capabilities.working_set
        scratch = max(self._arena_bytes, self.context("prefill", min(THRESHOLDS.chunk_rows, capacity), capacity, capacity, 1, ExecutionOptions()).arena_bytes())
        if weights + state + scratch > limit:
            raise DeviceError(
                f"a context of {capacity} tokens needs {(weights + state + scratch) / GIB:.2f} GiB (weights {weights / GIB:.2f}, state "
                f"{state / GIB:.2f}, scratch {scratch / GIB:.2f}), {self.gpu.name} offers {limit / GIB:.2f} GiB",
                fix="use a shorter prompt or fewer max_tokens, or raise the limit (sysctl iogpu.wired_limit_mb on a Mac)",
            )


def buffer_map(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """Every buffer name of a plan resolved: the engine's and a session's."""
    return {**engine.buffers, **state}

