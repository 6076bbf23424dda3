"""The barrier plan, proved on bytes (D3): under the hazard recorder no two unordered dispatches conflict, every dispatch
touches only what it declared, and no barrier can be removed without the recorder noticing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lily import _native
from lily.checkpoint import Checkpoint
from lily.model_files import resolve
from lily.random_checkpoint import with_layers, write_random_checkpoint

pytestmark = [
    pytest.mark.skipif(_native.live_objects() is None, reason="the software Metal records accesses"),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="instrumented kernels are compiled at run time, with ziglang"),
]

Scenario = dict[str, Any]
FORMS: dict[str, dict[str, bool]] = {"default": {}, "the article's chains": {"extended_fusion": False}, "unfused": {"fused_chains": False}}
SOME = [0, 1, 2, 3, 4, 5, -3, -2, -1]  # barriers: the first layer's and the end's
PLANS: dict[str, Scenario] = {f"decode, {name}": {"phase": "decode", "options": options} for name, options in FORMS.items()}
PLANS |= {f"prefill of {rows}": {"phase": "prefill", "rows": rows} for rows in (5, 40)}
MORE: dict[str, Scenario] = {
    "prefill, unfused": {"phase": "prefill", "rows": 40, "options": {"fused_chains": False}},
    "prefill, two tile lists": {"phase": "prefill", "rows": 300},
    "prefill, dequantised first": {"phase": "prefill", "rows": 40, "options": {"fused_dequant": False}},
    "prefill, blockwise scan": {"phase": "prefill", "rows": 40, "options": {"register_scan": False}},
    "prefill, scan by rows": {"phase": "prefill", "rows": 40, "options": {"chunked_gdn": False}},
    "prefill, logits of all rows": {"phase": "prefill", "rows": 12, "head_rows": 12},
    "prefill, no head": {"phase": "prefill", "rows": 12, "head_rows": 0},
    "prefill, sampled": {"phase": "prefill", "rows": 5, "sampled": True},
    "decode, sampled": {"phase": "decode", "sampled": True},
    "decode, sampled, adjusted, with logprobs": {"phase": "decode", "sampled": True, "extended": True},
    "prefill, sampled, adjusted, with logprobs": {"phase": "prefill", "rows": 5, "sampled": True, "extended": True},
    "decode, strided and unpacked": {"phase": "decode", "context": 600, "options": {"coalesced_kv": False, "gqa_packing": False}},
    "decode, 5,000 keys": {"phase": "decode", "context": 5000},
    "decode, 33,000 keys": {"phase": "decode", "context": 33000},
    "decode, 33,000 keys, general path": {"phase": "decode", "context": 33000, "options": {"fixed_block_attention": False}},
}


def run(scenarios: list[Scenario], model: str = "lily-tiny", order: str = "forward") -> list[dict[str, Any]]:
    """One result per scenario. With one worker a program without one of its barriers still runs in order, so a conflict
    shows as a conflict and not as what a kernel does with unfinished input."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("hazard_child.py")), model, *map(json.dumps, scenarios)], text=True,
                          capture_output=True, timeout=1200, env={**os.environ, "LILY_METAL_HOST": f"strict=2,hazards=on,workers=1,order={order}"})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_every_removal_is_detected(result: dict[str, Any]) -> None:
    missed = [m for m in result["mutations"] if "hazard: " not in m["message"]]
    assert not missed and result["mutations"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """lily-tiny's dims with four layers (three GDN, one attention) and random weights, for plans that run many times."""
    with Checkpoint.open(resolve("lily-tiny")) as tiny:
        config = tiny.config
    folder = tmp_path_factory.mktemp("small") / "model"
    return str(write_random_checkpoint(folder, with_layers(config, 4), tokenizer=resolve("lily-tiny")))


@pytest.fixture(scope="module")
def tiny() -> dict[str, dict[str, Any]]:
    return dict(zip(PLANS, run(list(PLANS.values())), strict=True))


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_touches_only_what_it_declares_and_nothing_unordered_conflicts(tiny: dict[str, dict[str, Any]], plan: str) -> None:
    result = tiny[plan]  # the run itself was clean: a conflict would have ended the child
    assert result["undeclared"] == [] and result["needless"] == []
    assert result["accesses"] > result["dispatches"] > result["barriers"] > 50


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_removal_of_a_barrier_is_detected(small: str, phase: str) -> None:
    plans = [{**plan, "mutate": SOME if phase == "decode" else SOME[:3]} for plan in PLANS.values() if plan["phase"] == phase]
    for result in run(plans, small):
        assert_every_removal_is_detected(result)


def test_whole_generations_run_clean(small: str) -> None:
    scenarios = [{"phase": "", "rows": rows, "options": options, "generate": True} for rows, options in zip((40, 5, 5), FORMS.values(), strict=True)]
    for result in run(scenarios, small):
        assert result["accesses"] > 0 and len(result["tokens"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_removal_of_every_barrier_is_detected(small: str, plan: str) -> None:
    (result,) = run([{**PLANS[plan], "mutate": "all"}], small)
    assert len(result["mutations"]) == result["barriers"] and result["needless"] == []
    assert_every_removal_is_detected(result)


@pytest.fixture(scope="module")
def more(small: str) -> dict[str, dict[str, Any]]:
    return dict(zip(MORE, run(list(MORE.values()), small), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("plan", MORE)
def test_every_barrier_of_a_control_path_is_needed(more: dict[str, dict[str, Any]], plan: str) -> None:
    """From the bytes that one run touched: the levels on both sides of every barrier conflict."""
    assert more[plan]["undeclared"] == [] and more[plan]["needless"] == []


@pytest.mark.slow
def test_orders_of_execution_touch_the_same_bytes_cleanly() -> None:
    for order in ("reverse", "random,seed=11"):
        for result in run(list(PLANS.values()), order=order):
            assert result["undeclared"] == []
