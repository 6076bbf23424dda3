"""The prefill plan: one chunk of a prompt (P5), matrix execution, the head only where logits are wanted."""

from __future__ import annotations

from ..graph import Op, head_ops, model_ops
from ..schedule import Dispatch, Region, assign_levels
from . import head, linear, mixers
from .context import Builder, PlanContext

LOWERINGS = {
    "embed": head.embed,
    "rmsnorm": head.rmsnorm,
    "add_rmsnorm": head.add_rmsnorm,
    "final_norm": head.final_norm,
    "argmax": head.argmax,
    "sample": head.sample,
    "linear": linear.linear,
    "router_topk": linear.router_topk,
    "route": linear.route,
    "expert_linear": linear.expert_linear,
    "silu_mul": linear.silu_mul,
    "silu_mul_shared": linear.silu_mul,
    "moe_combine": linear.moe_combine,
    "gdn_conv_silu": mixers.gdn_conv_silu,
    "gdn_qk_norm": mixers.gdn_qk_norm,
    "gdn_gates": mixers.gdn_gates,
    "gdn_scan": mixers.gdn_scan,
    "gdn_gated_norm": mixers.gdn_gated_norm,
    "attn_prepare": mixers.attn_prepare,
    "attention": mixers.attention,
    "output_gate": mixers.output_gate,
}


def lower(b: Builder, ops: list[Op], sampled: bool = False, stop_count: int = 0) -> None:
    for op in ops:
        if op.kind == "finish":
            head.finish(b, op, sampled, stop_count)
        else:
            LOWERINGS[op.kind](b, op)


def prefill_plan(ctx: PlanContext, fixed: dict[str, Region], *, choose: bool, sampled: bool = False, stop_count: int = 0) -> list[Dispatch]:
    """Dispatches of one chunk. `choose`: the chunk ends the prompt, so the next token is chosen from its last row;
    otherwise the state only advances. With `ctx.head_rows == ctx.rows` every row's logits are computed."""
    b = Builder(ctx, fixed)
    lower(b, model_ops(ctx.config, frozenset(ctx.groups)))
    if choose:
        lower(b, head_ops(ctx.config, sampled), sampled, stop_count)
    else:
        if ctx.head_rows:
            lower(b, head_ops(ctx.config, False)[:2])
        head.advance(b)
    return assign_levels(b.out)
