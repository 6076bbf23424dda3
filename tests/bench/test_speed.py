"""Timing a model: every variant in every round, shares of measured limits, state that stays at its length."""

from __future__ import annotations

from typing import Any

import pytest

from lily.bench.kernels import measure_kernels
from lily.bench.limits import Limits, Probe
from lily.bench.speed import Speed, macs_per_token
from lily.options import ExecutionOptions
from lily.plan_report import dram_bytes

LIMITS = Limits(copy=1e9, read=1e9, matrix=1e10)


def test_limits_are_measured(model: Any) -> None:
    limits = Probe(model.engine.gpu).limits(1 << 20)
    assert min(limits.copy, limits.read) > 1e7 and limits.matrix > 1e6


def test_every_variant_is_measured_in_every_round_beside_the_default(model: Any) -> None:
    variants = {"default": ExecutionOptions(), "fused_chains=off": ExecutionOptions(fused_chains=False)}
    seen: list[Any] = []
    rows = Speed(model.engine, LIMITS, steps=4).measure(["prefill", "decode"], [24, 40], 3, variants, seen.append)
    assert rows == seen
    assert [(r.phase, r.length, r.variant) for r in rows] == [(p, n, v) for n in (24, 40) for p in ("prefill", "decode") for v in variants]
    for row in rows:
        assert len(row.rates) == len(row.ratios) == 3 and min(row.rates) > 0
        assert row.variant != "default" or row.ratios == (1.0, 1.0, 1.0)
        assert (row.gpu_idle is None) == (row.phase == "prefill")
        assert row.memory_bytes > 16_000_000


def test_shares_are_the_plans_bytes_and_the_models_products_over_the_limits(model: Any) -> None:
    speed = Speed(model.engine, LIMITS, steps=3)
    prefill, decode = speed.measure(["prefill", "decode"], [32], 1, {"default": ExecutionOptions()}, lambda row: None)
    assert decode.share == pytest.approx(decode.rates[0] * sum(map(dram_bytes, speed.plan("decode", 32))) / LIMITS.copy)
    assert prefill.share == pytest.approx(prefill.rates[0] * 2 * macs_per_token(model.engine) / LIMITS.matrix)


def test_products_of_a_token_are_those_of_the_dims(model: Any) -> None:
    """lily-tiny: hidden 256, 8 layers of which 2 attend, top 8 of 32 experts of width 64 and one shared."""
    gdn = 256 * (2 * 2 * 128 + 4 * 128 + 4 * 128 + 8) + 4 * 128 * 256
    attention = 256 * (2 * 8 * 256 + 2 * 256) + 8 * 256 * 256
    moe = 256 * 33 + 9 * 3 * 64 * 256
    assert macs_per_token(model.engine) == 6 * gdn + 2 * attention + 8 * moe


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_kernels_of_a_pass_are_each_measured_alone(model: Any, phase: str) -> None:
    speed = Speed(model.engine, LIMITS, steps=4)
    rows, seconds = measure_kernels(speed, phase, 40, LIMITS)
    plan = speed.plan(phase, 40)
    assert sum(r.launches for r in rows) == len(plan) and seconds > 0
    assert sum(r.bytes for r in rows) == sum(map(dram_bytes, plan))
    assert [r.seconds for r in rows] == sorted((r.seconds for r in rows), reverse=True)
