"""`lily plan`: the figures that the plans have to reach, and that every switch changes the plan as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from lily.errors import RequestError
from lily.options import ExecutionOptions
from lily.plan_report import PlanReport, dram_bytes, load_dims, make_report


def report(phase: str = "decode", context: int = 4096, chunk: int | None = None, **options: Any) -> PlanReport:
    return make_report(*load_dims("qwen3.6-35b-a3b"), phase, context, chunk, ExecutionOptions(**options))


def kernels(r: PlanReport) -> set[str]:
    return {d.function for d in r.ops}


def test_the_decode_step_at_4k_reaches_its_figures() -> None:
    totals = report().totals()
    assert totals["launches"] <= 400 and totals["stages"] <= 300
    assert totals["modelled_ms"] <= 4.4
    assert abs(totals["bytes"] / totals["floor_bytes"] - 1) <= 0.03
    assert totals["min_heavy_threadgroups"] >= 80


@pytest.mark.parametrize("context", [1, 256, 257, 2560, 4096, 32767, 32768, 131072, 262144])
def test_heavy_stages_fill_forty_cores_twice_at_every_context(context: int) -> None:
    # Between 257 and 2,560 keys the KV stages move about a megabyte: blocks of 128 keys are the limit there.
    if not 257 <= context < 2560:
        assert report(context=context).totals()["min_heavy_threadgroups"] >= 80


def test_all_switches_off_shows_the_long_form() -> None:
    long = report(fused_chains=False, extended_fusion=False, gqa_packing=False, coalesced_kv=False, fixed_block_attention=False, register_scan=False)
    assert long.totals()["launches"] > 2 * report().totals()["launches"]
    assert {"attn_split", "attn_rope", "silu_mul", "moe_combine", "gdn_scan_blockwise_d128"} <= kernels(long)


def test_fused_chains_and_extended_fusion_shorten_the_plan_in_turn() -> None:
    lengths = [report(**o).totals()["launches"] for o in ({}, {"extended_fusion": False}, {"fused_chains": False})]
    assert lengths[0] < lengths[1] < lengths[2]


def test_packing_and_coalescing_choose_their_attention_kernels() -> None:
    assert "attn_decode_packed_split" in kernels(report())
    assert "attn_decode_split" in kernels(report(gqa_packing=False))
    assert all(d.constants == ((1, "bool", True),) for d in report(coalesced_kv=False).ops if d.function == "attn_decode_packed_split")


def test_fixed_blocks_begin_at_32k() -> None:
    def blocks(**o: Any) -> set[int]:
        return {d.grid[1] for d in report(**o).ops if d.function.endswith("_split")}

    assert blocks(context=32768) == {128} and blocks(context=32767) == {64} and blocks(context=131072, fixed_block_attention=False) == {64}


def test_the_prefill_switches_choose_their_kernels() -> None:
    base = report("prefill", chunk=2048)
    assert {"gdn_chunk_d128", "grouped_gemm_tensor_silu_bf16_b4_g64_m32", "grouped_gemm_tensor_silu_bf16_b4_g64_m16", "route_plan_split"} <= kernels(base)
    simdgroup = kernels(report("prefill", chunk=2048, tensor_ops=False))
    assert {"grouped_gemm_silu_bf16_b4_g64_m32", "gemm_bf16_b4_g64_m32"} <= simdgroup and not any("tensor" in k for k in simdgroup)
    assert "gdn_scan_d128" in kernels(report("prefill", chunk=2048, chunked_gdn=False))
    assert "gdn_scan_blockwise_d128" in kernels(report("prefill", chunk=2048, register_scan=False))
    assert not any(k.startswith("grouped") and "_m16" not in k for k in kernels(report("prefill", chunk=2048, tile_by_load=False)))
    expanded = report("prefill", chunk=2048, fused_dequant=False)
    assert {"dequantise_b4_g64", "gemm_tensor_bf16_w16_m32"} <= kernels(expanded)
    assert expanded.totals()["arena_bytes"] > base.totals()["arena_bytes"] + (1 << 30)


def test_the_two_tile_lists_share_a_level() -> None:
    level = {d.id: d.level for d in report("prefill", chunk=2048).ops}
    assert level["L0.expert_linear_silu"] == level["L0.expert_linear_silu_tail"]
    assert level["L0.experts_down"] == level["L0.experts_down_tail"] > level["L0.expert_linear_silu"]


def test_the_floor_of_the_35b_is_what_the_dims_say() -> None:
    r = report()
    assert abs(sum(dram_bytes(d) for d in r.ops) - (1667e6 + 129e6 + 20480 * 4096)) < 0.01 * 1880e6  # MODEL.md, per token


def test_json_and_svg_are_well_formed() -> None:
    import xml.etree.ElementTree as tree

    r = report()
    data = json.loads(r.to_json())
    assert data["totals"]["launches"] == len(data["ops"]) and {"id", "kernel", "grid", "threadgroup", "reads", "writes", "bytes", "level"} == data["ops"][0].keys()
    assert tree.fromstring(r.svg()).tag.endswith("svg")


@pytest.mark.parametrize("arguments", [dict(context=0), dict(context=10**9), dict(phase="warmup")])
def test_impossible_plans_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        report(**arguments)


def test_the_command_needs_no_weights() -> None:
    result = subprocess.run([sys.executable, "-m", "lily", "plan", "--context", "4096", "--option", "fused_chains=off", "--json"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["dims"]["layers"] == 40
