"""Plans as data: what they launch, that regions fit their buffers, and that levels respect every hazard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lily import policy
from lily.options import ExecutionOptions
from lily.plan_inputs import default_groups, plain_bytes
from lily.plans.context import PlanContext, session_state_bytes, weight_region
from lily.plans.decode import decode_plan
from lily.plans.prefill import prefill_plan
from lily.presets import PRESETS
from lily.schedule import Dispatch, Region, assign_levels, barriers, conflicts

FIXED = {"step": Region("step", 0, 160), "sample_params": Region("sample_params", 0, 24), "stop_ids": Region("stop_ids", 0, 256)}
ROPE = {"rope_lo": 512 * 256, "rope_hi": 512 * 256}


def context(preset: str, rows: int, keys: int = 4096, head_rows: int = 1, **options: object) -> PlanContext:
    config = PRESETS[preset]
    return PlanContext(config, default_groups(config), {**plain_bytes(config), **ROPE}, "decode" if rows == 1 else "prefill", rows, keys, max(keys, rows), head_rows,
                       ExecutionOptions(**options), policy.Capabilities())  # type: ignore[arg-type]


def plans(preset: str) -> dict[str, tuple[PlanContext, list[Dispatch]]]:
    one, many = context(preset, 1), context(preset, 300)
    return {"decode": (one, decode_plan(one, FIXED, sampled=False, stop_count=2)), "prefill": (many, prefill_plan(many, FIXED, choose=True))}


def buffer_sizes(ctx: PlanContext) -> dict[str, int]:
    sizes = {"arena": ctx.arena_bytes(), **session_state_bytes(ctx.config, ctx.capacity), **{f"p:{n}": b for n, b in ctx.plain.items()}}
    sizes |= {r.buffer: r.nbytes for r in FIXED.values()}
    for g in ctx.groups.values():
        for part in ("weight", "scales", "biases"):
            sizes[weight_region(g, part).buffer] = weight_region(g, part).nbytes  # type: ignore[arg-type]
    return sizes


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_region_lies_inside_its_buffer_and_no_grid_is_empty(preset: str, phase: str) -> None:
    ctx, plan = plans(preset)[phase]
    sizes = buffer_sizes(ctx)
    for d in plan:
        assert min(d.grid) >= 1 and d.threads[0] % 32 == 0 and d.threads[0] <= 1024, d.id
        assert len({b.index for b in d.bindings}) == len(d.bindings) and max(b.index for b in d.bindings) < 31, d.id
        for b in d.bindings:
            assert 0 <= b.region.offset and b.region.offset + b.region.nbytes <= sizes[b.region.buffer], (d.id, b)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_conflicting_dispatches_never_share_a_level(phase: str) -> None:
    _, plan = plans("lily-tiny")[phase]
    for i, a in enumerate(plan):
        for b in plan[i + 1 :]:
            if a.level == b.level:
                assert not conflicts(a, b), (a.id, b.id)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_barrier_is_needed(phase: str) -> None:
    """Between two neighbouring levels stands at least one conflict, so no barrier of the plan is superfluous."""
    _, plan = plans("lily-tiny")[phase]
    by_level: dict[int, list[Dispatch]] = {}
    for d in plan:
        by_level.setdefault(d.level, []).append(d)
    for level in range(1, max(by_level) + 1):
        assert any(conflicts(a, b) for a in by_level[level - 1] for b in by_level[level]), level
    assert sum(barriers(plan)) == max(by_level)


def test_independent_launches_of_a_layer_overlap() -> None:
    plan = decode_plan(context("lily-tiny", 1, fused_chains=False), FIXED, sampled=False, stop_count=2)
    level = {d.id: d.level for d in plan}
    assert level["L0.gdn_gates"] < level["L0.gdn_scan"] and level["L0.gdn_gates"] <= level["L0.gdn_qk_norm"]


def test_the_decode_step_reads_the_weights_of_the_chosen_experts_only() -> None:
    _, plan = plans("qwen3.6-35b-a3b")["decode"]
    weights = sum(b.moved for d in plan for b in d.bindings if b.region.buffer.split(":")[0] in ("weight", "scales", "biases"))
    assert abs(weights / 1667e6 - 1) < 0.01  # MODEL.md: 1,667 MB a token


def test_levels_do_not_depend_on_the_numbering_of_an_already_scheduled_plan() -> None:
    _, plan = plans("lily-tiny")["decode"]
    again = assign_levels([replace(d, level=-1) for d in plan])
    assert [d.level for d in again] == [d.level for d in plan]
