"""Did it fuse? The table's entries by count, under every switch."""

from __future__ import annotations

from collections import Counter

import pytest

from lily.fusions import FUSIONS, fuse
from lily.graph import Op, head_ops, model_ops
from lily.options import ExecutionOptions
from lily.plan_inputs import default_groups
from lily.presets import PRESETS

CONFIG = PRESETS["qwen3.6-35b-a3b"]
GROUPS = frozenset(default_groups(CONFIG))


def fused(phase: str, joined: bool = True, **options: bool) -> tuple[list[Op], Counter[str]]:
    ops = model_ops(CONFIG, GROUPS)
    return fuse([*ops, *head_ops(CONFIG, False)] if phase == "decode" else ops, phase, ExecutionOptions(**options), joined)


def test_decode_takes_every_chain_of_every_layer() -> None:
    _, counts = fused("decode")
    assert counts == {"E1": 30, "E2": 30, "E3": 10, "D4.1": 40, "D4.2": 40, "D4.3": 10, "D4.4": 0, "E4": 40, "E6": 81}


def test_without_the_extended_fusions_the_four_chains_of_d4_remain() -> None:
    ops, counts = fused("decode", extended_fusion=False)
    assert counts == {"D4.1": 40, "D4.2": 40, "D4.3": 10, "D4.4": 30}
    assert not {"gdn_step", "gate_add", "gated_norm_add", "route_gate_up"} & {op.kind for op in ops}


def test_without_fused_chains_nothing_is_fused_whatever_extended_fusion_says() -> None:
    for extended in (True, False):
        ops, counts = fused("decode", fused_chains=False, extended_fusion=extended)
        assert not +counts
        assert len(ops) == len([op for op in model_ops(CONFIG, GROUPS) if op.kind != "route"]) + len(head_ops(CONFIG, False))


def test_prefill_takes_its_own_entries() -> None:
    _, counts = fused("prefill")
    assert counts == {"D4.3": 10, "E5": 40}


def test_a_shared_expert_of_its_own_format_keeps_the_down_projection_and_the_combination_apart() -> None:
    ops, counts = fused("decode", joined=False)
    assert counts["D4.2"] == 0 and sum(op.kind == "moe_combine" for op in ops) == 40


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_value_that_is_read_was_written_before(phase: str) -> None:
    for options in ({}, {"extended_fusion": False}, {"fused_chains": False}):
        ops, _ = fused(phase, **options)
        known = {"ids", "step", "stop_ids", "sampled", "sample_params", "sorted_rows", "block_map", "row_pos"}
        for op in ops:
            for name in op.reads:
                assert name in known or "." in name or name.startswith("p:"), (op.id, name, options)
            known |= set(op.writes)


def test_every_entry_has_an_id_and_a_reason() -> None:
    assert len({f.id for f in FUSIONS}) == len(FUSIONS) and all(f.why for f in FUSIONS)
