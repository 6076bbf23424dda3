"""Random weights in memory are a working model: nothing zero, nothing constant, experts unevenly loaded."""

from __future__ import annotations

import numpy as np

from lily.bench.random_weights import RandomWeights
from lily.engine import Engine
from lily.gpu import Gpu
from lily.options import ExecutionOptions
from lily.presets import PRESETS
from lily.random_checkpoint import with_layers
from lily.session import Session

CONFIG = with_layers(PRESETS["lily-tiny"], 4)


def test_logits_are_finite_and_differ_between_tokens() -> None:
    engine = Engine(RandomWeights(CONFIG, seed=1), Gpu(), context=512, cache_bytes=0)
    logits = Session(engine).logits(np.random.default_rng(2).integers(0, CONFIG.vocab_size, 48).tolist(), ExecutionOptions())
    assert np.isfinite(logits).all() and 0.1 < logits.std() < 30
    assert len({int(row.argmax()) for row in logits}) > 8


def test_every_part_is_filled_and_the_seed_decides_it() -> None:
    def parts(seed: int) -> list[np.ndarray]:
        source, out = RandomWeights(CONFIG, seed), []
        for group in source.layout():
            views = [np.zeros(group.weight_bytes, np.uint8), np.zeros(group.scale_bytes, np.uint8), np.zeros(group.scale_bytes, np.uint8)]
            source.load_group(group, *views)
            out += views
        return out

    first, same, other = parts(1), parts(1), parts(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    for part, different in zip(first, other, strict=True):
        assert not np.array_equal(part, different)
        tail = part.view(np.uint16)[-(len(part) // 16) :]
        assert np.count_nonzero(tail) > 0.99 * tail.size


def test_the_stated_bytes_are_those_that_are_loaded() -> None:
    done: list[tuple[int, int]] = []
    source = RandomWeights(CONFIG, progress=lambda *at: done.append(at))
    for group in source.layout():
        source.load_group(group, *(np.empty(n, np.uint8) for n in (group.weight_bytes, group.scale_bytes, group.scale_bytes)))
    small = sum(source.plain(name).nbytes for name in source.plain_names())
    assert done[-1] == (source.total_bytes - small, source.total_bytes)
