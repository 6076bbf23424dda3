"""Random weights of any dims, straight into the device's memory: a benchmark needs no checkpoint on disk.

Values follow `random_checkpoint`: uniform integers, scales of both signs and zero mean, router rows of different length, so
that activations stay finite, experts are unevenly loaded and nothing is zero. Words repeat after some megabytes; a GPU's
speed does not depend on that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from ..config import ModelConfig
from ..plan_inputs import default_groups
from ..random_checkpoint import plain_values
from ..reading import Bytes
from ..weight_layout import Group
from ..weight_map import plain_tensors

_BLOCK = 8 << 20
Progress = Callable[[int, int], None]


class RandomWeights:
    """What `Engine` needs of a checkpoint, made up. `seed` decides every byte."""

    def __init__(self, config: ModelConfig, seed: int = 0, progress: Progress | None = None) -> None:
        self.config: ModelConfig = config
        self._groups = default_groups(config)
        self._plain = plain_tensors(config)
        self._rng = np.random.default_rng(seed)
        self._words = np.frombuffer(self._rng.bytes(_BLOCK + 4096), np.uint8)
        self._progress, self._done, self._seed = progress, 0, seed

    def layout(self) -> list[Group]:
        return list(self._groups.values())

    @property
    def total_bytes(self) -> int:
        small = sum(4 * int(np.prod(spec.shape)) for spec in self._plain.values())
        return sum(g.weight_bytes + 2 * g.scale_bytes for g in self._groups.values()) + small

    def plain_names(self) -> list[str]:
        return list(self._plain)

    def plain(self, name: str) -> np.ndarray:
        """A small tensor as float32 in its logical shape."""
        return plain_values(self._rng, name, self._plain[name].shape)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"random {self._seed} {self.config}".encode()).hexdigest()

    def load_group(self, group: Group, weights: Bytes, scales: Bytes | None = None, biases: Bytes | None = None) -> None:
        """Fills the parts of a group; the views have the sizes that `Checkpoint.load_group` asks for."""
        start = int(self._rng.integers(1024)) * 4
        for at in range(0, weights.nbytes, _BLOCK):
            size = min(_BLOCK, weights.nbytes - at)
            weights[at : at + size] = self._words[start : start + size]
        if scales is not None and biases is not None:
            scale, bias = self._scales(group)
            _repeat(scales, scale)
            _repeat(biases, bias)
        self._done += weights.nbytes + 2 * (0 if scales is None else scales.nbytes)
        if self._progress is not None:
            self._progress(self._done, self.total_bytes)

    def _scales(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """bfloat16 scales and biases of some rows, which the rest of the group repeats."""
        top = 2**group.bits - 1
        rows = min(group.rows, 4096) if group.name.rsplit(".", 1)[-1] != "router" else group.rows
        shape = (rows, group.k // group.group_size)
        scale = self._rng.uniform(0.5, 1.5, shape).astype(np.float32) * self._rng.choice(np.array([-1, 1], np.float32), shape)
        scale *= np.float32(1 / (np.sqrt((top * (top + 2)) / 12) * np.sqrt(group.k)))
        if group.name.endswith(".router"):  # as random_checkpoint: some experts are chosen far more often
            scale *= self._rng.lognormal(0.7, 0.35, (rows, 1)).astype(np.float32)
        return _bf16(scale), _bf16(scale * np.float32(-top / 2))


def _bf16(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)


def _repeat(view: Bytes, block: np.ndarray) -> None:
    for at in range(0, view.nbytes, block.nbytes):
        size = min(block.nbytes, view.nbytes - at)
        view[at : at + size] = block[:size]
