"""The control of P2: the CPU's lists are the GPU's, so the state is the same to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lily.host_routing import HostRoutedProgram, route_lists
from lily.options import ExecutionOptions
from lily.plan_report import load_dims, make_report
from lily.schedule import HOST
from lily.session import Session
from tests.reference import moe


@pytest.mark.parametrize("tile, tail_tile", [(16, 0), (32, 16), (32, 8)])
@pytest.mark.parametrize("total, experts", [(1, 1), (27, 33), (2601, 257)])
def test_the_lists_equal_the_reference(total: int, experts: int, tile: int, tail_tile: int) -> None:
    rng = np.random.default_rng(total)
    ids = rng.choice(experts, total, p=rng.dirichlet(np.full(experts, 0.3))).astype(np.uint32)
    max_blocks, max_tail = -(-total // tile) + min(experts, total), min(experts, total) if tail_tile else 0
    lists = route_lists(ids, experts, tile, max_blocks, tail_tile, max_tail)
    expected = moe.route_plan_split(ids, experts, tile, max_blocks, tail_tile, max_tail)
    for name, wanted in zip(("offsets", "sorted_rows", "row_pos", "block_map", "tail_map"), expected, strict=True):
        assert np.array_equal(lists[name], wanted), name


def test_p2_stops_once_per_layer_and_the_state_is_the_same_to_the_byte(model: Any, goldens: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    stops = []
    original = HostRoutedProgram._route
    monkeypatch.setattr(HostRoutedProgram, "_route", lambda self, step: (stops.append(step.id), original(self, step))[1])
    ids = goldens[9]["prompt_ids"]
    gpu, cpu = Session(model.engine), Session(model.engine)
    assert np.array_equal(gpu.logits(ids, ExecutionOptions()), cpu.logits(ids, ExecutionOptions(gpu_routing=False)))
    assert len(set(stops)) == model.engine.config.num_layers
    for name, value in gpu.state_arrays().items():
        assert np.array_equal(value, cpu.state_arrays()[name]), name


def test_the_plan_shows_the_stops() -> None:
    config, groups = load_dims("qwen3.6-35b-a3b")
    on, off = (make_report(config, groups, "prefill", 2048, None, ExecutionOptions(gpu_routing=routing)).totals() for routing in (True, False))
    assert (on["cpu_stops"], off["cpu_stops"]) == (0, config.num_layers)
    assert off["launches"] == on["launches"] - config.num_layers and off["modelled_ms"] > on["modelled_ms"]
    decode = make_report(config, groups, "decode", 4096, None, ExecutionOptions(gpu_routing=False))
    assert not any(d.family == HOST for d in decode.ops)
