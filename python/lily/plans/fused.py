"""Lowering of the fused decode operations (D4 and past it): see `fusions.FUSIONS` for what each covers and why."""

from __future__ import annotations

from ..graph import Op
from . import geometry as geo
from .context import Builder, row_stride
from .linear import output_columns, weight_bindings


def norm_linear(b: Builder, op: Op) -> None:
    """E6: a projection of RMSNorm(h): each group sums h² as it reads h and applies the scalar after the dot products."""
    assert op.weight is not None and op.norm is not None
    g, tuning = b.ctx.groups[op.weight], b.ctx.capabilities.tuning
    target, _, kind = output_columns(b, op, g)
    threads = geo.team_threads(g.k, geo.NORM_GEMV_THREADS, tuning)
    rows = geo.ROUTER_ROWS if op.writes[0] in ("router_logits", "shared_logit") else geo.TEAM_ROWS
    groups, constants = geo.row_job(g.n, 1, g.k, geo.team_groups(g.n, rows, tuning), tuning)
    b.emit(op.id, "fused_projection", f"gemv_norm_{kind}_{g.suffix}",
           [*weight_bindings(b, g), b.bind(3, "h"), b.bind(4, target, "w", g.n * (4 if kind == "f32" else 2)), b.bind(6, op.norm)], 5,
           "GemvNormArgs", {"n": g.n, "k": g.k, "eps": b.config.rms_norm_eps}, (groups, 1, 1), threads, g.n * g.k, constants)


def gdn_step(b: Builder, op: Op) -> None:
    """E1: convolution, norms, gates and recurrence of one token."""
    c, ctx, p, tuning = b.config, b.ctx, f"layers.{op.layer}", b.ctx.capabilities.tuning
    conv, ring = f"conv.{op.layer}", f"gdn.{op.layer}"
    conv_slot, state_slot = b.region(conv).nbytes // 3, b.region(ring).nbytes // 3
    own = "ba" in op.reads
    gates = ctx.groups[f"{p}.gdn_ba" if own else f"{p}.gdn_in"]
    b.emit(op.id, "gdn_step", f"gdn_step_d{c.dk}",
           [b.bind(0, "proj"), b.bind(1, f"p:{p}.conv1d"), b.bind(2, conv, "rw", conv_slot), b.bind(3, f"p:{p}.A_log"), b.bind(4, f"p:{p}.dt_bias"),
            b.bind(5, ring, "rw", state_slot), b.bind(6, "scan", "w"), b.bind(7, "step"), b.bind(9, "ba" if own else "proj")], 8, "GdnStepArgs",
           {"k_heads": c.k_heads, "v_heads": c.v_heads, "dk": c.dk, "dv": c.dv, "taps": c.conv_taps, "b_offset": gates.offsets["b"],
            "a_offset": gates.offsets["a"], "conv_stride": conv_slot // 2, "state_stride": state_slot // 4},
           geo.step_grid(c.dv, c.v_heads, tuning), tuning.step_threads, macs=2 * c.v_heads * c.dv * c.dk)


def gdn_scan_norm(b: Builder, op: Op) -> None:
    """D4.4, the article's chain: recurrent update with its gated norm, one threadgroup per value head."""
    c, ctx, p = b.config, b.ctx, f"layers.{op.layer}"
    ring = f"gdn.{op.layer}"
    slot = b.region(ring).nbytes // 3
    g = ctx.groups[f"{p}.gdn_in"]
    b.emit(op.id, "gdn_step", f"gdn_scan_norm_d{c.dk}",
           [b.bind(0, "conv"), b.bind(1, "decay"), b.bind(2, "beta"), b.bind(3, ring, "rw", slot), b.bind(4, "mix", "w", 2 * c.value_width),
            b.bind(5, "step"), b.bind(7, b.region("proj").slice(2 * g.offsets["z"]), "r", 2 * c.value_width), b.bind(8, f"p:{p}.gdn_norm")], 6,
           "ScanNormArgs", {"k_heads": c.k_heads, "v_heads": c.v_heads, "dk": c.dk, "dv": c.dv, "ring_stride": slot // 4, "eps": c.rms_norm_eps},
           (c.v_heads, 1, 1), geo.scan_norm_threads(ctx.capabilities.tuning), macs=2 * c.v_heads * c.dv * c.dk)


def gated_norm_add(b: Builder, op: Op) -> None:
    """E2: h += out_proj(gated norm of the recurrence's output)."""
    assert op.weight is not None
    c, ctx, p, tuning = b.config, b.ctx, f"layers.{op.layer}", b.ctx.capabilities.tuning
    g, z = ctx.groups[op.weight], ctx.groups[f"{p}.gdn_in"].offsets["z"]
    b.emit(op.id, "fused_projection", f"gemv_gated_norm_add_{g.suffix}",
           [*weight_bindings(b, g), b.bind(3, "scan"), b.bind(4, "h", "rw"), b.bind(6, b.region("proj").slice(2 * z), "r", 2 * c.value_width),
            b.bind(7, f"p:{p}.gdn_norm")], 5, "GatedNormAddArgs", {"n": g.n, "k": g.k, "dv": c.dv, "eps": c.rms_norm_eps},
           (geo.team_groups(g.n, tuning.out_rows, tuning), 1, 1), geo.team_threads(g.k, geo.OUT_THREADS, tuning), g.n * g.k, geo.team_constants(g.k, tuning))


def gate_add(b: Builder, op: Op) -> None:
    """E3: h += o_proj(attention * sigmoid(gate))."""
    assert op.weight is not None
    g, tuning = b.ctx.groups[op.weight], b.ctx.capabilities.tuning
    b.emit(op.id, "fused_projection", f"gemv_gate_add_{g.suffix}",
           [*weight_bindings(b, g), b.bind(3, "mix"), b.bind(4, "h", "rw"), b.bind(6, "proj")], 5, "GateAddArgs",
           {"n": g.n, "k": g.k, "head_dim": b.config.head_dim}, (geo.team_groups(g.n, tuning.out_rows, tuning), 1, 1),
           geo.team_threads(g.k, geo.OUT_THREADS, tuning), g.n * g.k, geo.team_constants(g.k, tuning))


def moe_gate_up(b: Builder, op: Op) -> None:
    """D4.1: gate and up projections of every slot with the activation; E4 adds the choice of experts, E6 the norm."""
    assert op.weight is not None
    c, ctx, tuning = b.config, b.ctx, b.ctx.capabilities.tuning
    g = ctx.groups[op.weight]
    routed = op.kind == "route_gate_up"
    per_slot = geo.team_groups(c.expert_width, tuning.gate_up_columns, tuning)
    if tuning.max_groups:
        per_slot = max(1, -(-tuning.max_groups // ctx.slots))
    per_slot, constants = geo.row_job(c.expert_width, 2, g.k, per_slot, tuning)
    norm = op.norm or f"p:layers.{op.layer}.post_norm"
    mode = "w" if routed else "r"
    b.emit(op.id, "moe_decode", f"moe_gate_up_{g.suffix}",
           [*weight_bindings(b, g, min(1.0, ctx.slots / g.experts)), b.bind(3, "h" if op.norm else "x"), b.bind(4, "act", "w"), b.bind(6, norm),
            b.bind(7, "router_logits"), b.bind(8, "expert_ids", mode), b.bind(9, "expert_weights", mode)], 5, "MoeGateUpArgs",
           {"slots": ctx.slots, "top_k": c.top_k, "experts": c.num_experts, "width": c.expert_width, "k": g.k, "matrices": g.experts,
            "eps": c.rms_norm_eps, "normed": int(op.norm is not None), "topk": int(routed), "normalise": int(c.norm_topk_prob)},
           (per_slot, ctx.slots, 1), geo.team_threads(g.k, geo.GATE_UP_THREADS, tuning), ctx.slots * g.n * g.k, constants)


def moe_down_add(b: Builder, op: Op) -> None:
    """D4.2: h += the weighted outputs of all slots."""
    assert op.weight is not None
    c, ctx, tuning = b.config, b.ctx, b.ctx.capabilities.tuning
    g = ctx.groups[op.weight]
    groups, constants = geo.row_job(c.hidden_size, 1, ctx.slots * g.k, geo.team_groups(c.hidden_size, tuning.out_rows, tuning), tuning)
    b.emit(op.id, "moe_decode", f"moe_down_add_{g.suffix}",
           [*weight_bindings(b, g, min(1.0, ctx.slots / g.experts)), b.bind(3, "act"), b.bind(4, "h", "rw"), b.bind(6, "expert_ids"),
            b.bind(7, "expert_weights")], 5, "MoeDownArgs", {"slots": ctx.slots, "n": c.hidden_size, "k": g.k, "matrices": g.experts},
           (groups, 1, 1), geo.team_threads(ctx.slots * g.k, geo.DOWN_THREADS, tuning), ctx.slots * g.n * g.k, constants)


# D4.3's control: the four kernels that attn_prepare replaces.
def _prepare_args(b: Builder, op: Op) -> dict[str, float | int]:
    c, g = b.config, b.ctx.groups[f"layers.{op.layer}.attn_in"]
    return {"rows": b.ctx.rows, "q_heads": c.q_heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "rotary_dim": c.rotary_dim,
            "ldp": row_stride(g), "k_offset": g.offsets["k"], "v_offset": g.offsets["v"], "rope_lo_rows": geo.ROPE_LO_ROWS, "eps": c.rms_norm_eps}


def attn_split(b: Builder, op: Op) -> None:
    heads = b.config.q_heads + b.config.kv_heads
    b.emit(op.id, "attention_unfused", "attn_split", [b.bind(0, "proj"), b.bind(1, "q", "w"), b.bind(2, "k", "w")], 3, "AttnPrepareArgs",
           _prepare_args(b, op), geo.prepare_grid(heads, b.ctx.rows), geo.PREPARE_THREADS)


def attn_qk_norm(b: Builder, op: Op) -> None:
    heads, p = b.config.q_heads + b.config.kv_heads, f"p:layers.{op.layer}"
    b.emit(op.id, "attention_unfused", "attn_qk_norm",
           [b.bind(0, "q", "rw"), b.bind(1, "k", "rw"), b.bind(2, f"{p}.q_norm"), b.bind(3, f"{p}.k_norm")], 4, "AttnPrepareArgs",
           _prepare_args(b, op), geo.prepare_grid(heads, b.ctx.rows), geo.PREPARE_THREADS)


def attn_rope(b: Builder, op: Op) -> None:
    c = b.config
    b.emit(op.id, "attention_unfused", "attn_rope",
           [b.bind(0, "q", "rw"), b.bind(1, "k", "rw"), b.bind(2, "p:rope_lo", "r", 0), b.bind(3, "p:rope_hi", "r", 0), b.bind(4, "step")], 5,
           "AttnPrepareArgs", _prepare_args(b, op), geo.flat(b.ctx.rows * (c.q_heads + c.kv_heads) * c.rotary_dim // 2), geo.ELEMENTWISE_THREADS)


def attn_cache_write(b: Builder, op: Op) -> None:
    written = 2 * b.ctx.rows * b.config.kv_width
    b.emit(op.id, "attention_unfused", "attn_cache_write",
           [b.bind(0, "k"), b.bind(1, "proj"), b.bind(2, f"kv_k.{op.layer}", "w", written), b.bind(3, f"kv_v.{op.layer}", "w", written),
            b.bind(4, "step")], 5, "AttnPrepareArgs", _prepare_args(b, op), geo.prepare_grid(2 * b.config.kv_heads, b.ctx.rows), geo.PREPARE_THREADS)
