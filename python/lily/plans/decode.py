"""The decode plan: one token through all layers, the token handed over on the GPU (D2)."""

from __future__ import annotations

from dataclasses import replace

from ..fusions import fuse
from ..graph import head_ops, model_ops
from ..schedule import Dispatch, Region, assign_levels
from .context import Builder, PlanContext
from .prefill import lower


def decode_plan(
    ctx: PlanContext, fixed: dict[str, Region], *, sampled: bool, stop_count: int, adjusted: bool = False, logprobs: bool = False,
) -> list[Dispatch]:
    """Dispatches of one decode step for contexts up to `ctx.context`; recorded once, encoded for every step."""
    b = Builder(ctx, fixed)
    ops = model_ops(ctx.config, frozenset(ctx.groups))
    ops[0] = replace(ops[0], reads=("step",))
    fused, _ = fuse([*ops, *head_ops(ctx.config, sampled, adjusted, logprobs)], "decode", ctx.options, ctx.shared_joined)
    lower(b, fused, sampled, stop_count)
    return assign_levels(b.out)
