"""The prefill plan: one chunk of a prompt (P5), matrix execution, the head only where logits are wanted."""

from __future__ import annotations

from ..fusions import fuse
from ..graph import Op, head_ops, model_ops
from ..schedule import Dispatch, Region, assign_levels
from . import fused, head, linear, mixers
from .context import Builder, PlanContext

LOWERINGS = {
    "embed": head.embed,
    "rmsnorm": head.rmsnorm,
    "add_rmsnorm": head.add_rmsnorm,
    "final_norm": head.final_norm,
    "argmax": head.argmax,
    "adjust": head.adjust,
    "sample": head.sample,
    "logprobs": head.logprobs,
    "linear": linear.linear,
    "router_topk": linear.router_topk,
    "route": linear.route,
    "expert_linear": linear.expert_linear,
    "expert_linear_silu": linear.expert_linear_silu,
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
    "gdn_step": fused.gdn_step,
    "gdn_scan_norm": fused.gdn_scan_norm,
    "gated_norm_add": fused.gated_norm_add,
    "gate_add": fused.gate_add,
    "moe_gate_up": fused.moe_gate_up,
    "route_gate_up": fused.moe_gate_up,
    "moe_down_add": fused.moe_down_add,
    "attn_split": fused.attn_split,
    "attn_qk_norm": fused.attn_qk_norm,
    "attn_rope": fused.attn_rope,
    "attn_cache_write": fused.attn_cache_write,
}


def lower(b: Builder, ops: list[Op], sampled: bool = False, stop_count: int = 0) -> None:
    for op in ops:
        if op.kind == "finish":
            head.finish(b, op, sampled, stop_count)
        elif op.kind == "linear" and op.norm is not None:
            fused.norm_linear(b, op)
        else:
            LOWERINGS[op.kind](b, op)


def prefill_plan(
    ctx: PlanContext, fixed: dict[str, Region], *, choose: bool, sampled: bool = False, stop_count: int = 0, adjusted: bool = False, logprobs: bool = False,
) -> list[Dispatch]:
    """Dispatches of one chunk. `choose`: the chunk ends the prompt, so the next token is chosen from its last row;
    otherwise the state only advances. With `ctx.head_rows == ctx.rows` every row's logits are computed."""
    b = Builder(ctx, fixed)
    lower(b, fuse(model_ops(ctx.config, frozenset(ctx.groups)), "prefill", ctx.options, ctx.shared_joined)[0])
    if choose:
        lower(b, head_ops(ctx.config, sampled, adjusted, logprobs), sampled, stop_count)
    else:
        if ctx.head_rows:
            lower(b, head_ops(ctx.config, False)[:2])
        head.advance(b)
    return assign_levels(b.out)
