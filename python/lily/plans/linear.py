"""Lowering of the projections and of the mixture of experts."""

from __future__ import annotations

from .. import policy
from ..graph import Op
from ..schedule import Binding, Region
from ..weight_layout import Group, Part
from . import geometry as geo
from .context import Builder, row_stride, weight_region


def weight_bindings(b: Builder, g: Group, share: float = 1.0) -> list[Binding]:
    """Weights at 0, scales at 1, biases at 2; `share` of the bytes is read (experts that are routed to)."""
    parts: tuple[Part, ...] = ("weight",) if g.bits == 16 else ("weight", "scales", "biases")
    return [b.bind(i, r, "r", int(r.nbytes * share)) for i, r in enumerate(weight_region(g, p) for p in parts)]


def output_columns(b: Builder, op: Op, g: Group) -> tuple[Region, int, str]:
    """Target region, row stride in elements and output type of a projection."""
    c, target = b.config, op.writes[0]
    kind = "f32" if target in ("router_logits", "shared_logit", "logits") else "bf16"
    if target == "expert_out":  # a shared expert of its own format: its rows follow the routed ones (see expert_rows)
        return shared_rows(b), c.hidden_size * (b.ctx.slots if b.ctx.expert_gemv else 1), kind
    if target in ("proj", "ba"):
        return b.region(target), row_stride(g), kind
    return b.region(target), g.n, kind


def shared_rows(b: Builder) -> Region:
    """Where rows of a separate shared expert stand in `expert_out`: slot top_k of each row, or, sorted by expert, behind
    all routed rows, since its pseudo expert has the highest id and the sort is stable."""
    c, ctx = b.config, b.ctx
    skip = c.top_k * (1 if ctx.expert_gemv else ctx.rows)
    return b.region("expert_out").slice(2 * skip * c.hidden_size)


def linear(b: Builder, op: Op) -> None:
    """A dense projection: GEMV for a few rows (D1), else a matrix product that dequantises in the tile (P1)."""
    assert op.weight is not None
    g = b.ctx.groups[op.weight]
    rows = b.ctx.head_rows if op.weight == "lm_head" else b.ctx.rows
    target, ldy, kind = output_columns(b, op, g)
    ldx = b.config.shared_width if op.reads[0] == "shared_act" else g.k
    args = {"rows": rows, "n": g.n, "k": g.k, "ldx": ldx, "ldy": ldy}
    bindings = [*weight_bindings(b, g), b.bind(3, op.reads[0], "r", 2 * rows * g.k), b.bind(4, target, "w", rows * g.n * (4 if kind == "f32" else 2))]
    macs = rows * g.n * g.k
    if policy.use_gemv("decode" if op.weight == "lm_head" else b.ctx.phase, rows):  # the head leaves no state behind
        per_group = geo.gemv_rows(g.n, g.k, g.bits)
        b.emit(op.id, "gemv", f"gemv_{kind}_{g.suffix}", bindings, 5, "GemvArgs", args,
               (-(-g.n // per_group), rows, 1), geo.GEMV_THREADS, macs)
    else:
        b.emit(op.id, "gemm", f"gemm_{kind}_{g.suffix}", bindings, 5, "GemmArgs", args,
               (-(-g.n // geo.GEMM_COLUMNS), -(-rows // geo.GEMM_ROWS), 1), geo.GEMM_THREADS, macs)


def router_topk(b: Builder, op: Op) -> None:
    c, ctx = b.config, b.ctx
    joined = op.reads[1] == "router_logits"
    ld = c.num_experts + 1 if joined else c.num_experts
    logits = b.region("router_logits")
    gate = logits.slice(4 * c.num_experts) if joined else b.region("shared_logit")
    args = {"rows": ctx.rows, "experts": c.num_experts, "top_k": c.top_k, "shared_slots": ctx.shared_slots,
            "ld": ld, "ld_shared": ld if joined else 1, "normalise": int(c.norm_topk_prob)}
    b.emit(op.id, "routing", "router_topk",
           [b.bind(0, logits), b.bind(1, gate), b.bind(2, "expert_ids", "w"), b.bind(3, "expert_weights", "w")],
           4, "RouterArgs", args, (-(-ctx.rows // geo.TOPK_ROWS), 1, 1), geo.TOPK_THREADS)


def route(b: Builder, op: Op) -> None:
    """P2: histogram, scan, scatter and block map on the GPU; not needed when every (row, slot) runs alone."""
    ctx = b.ctx
    if ctx.expert_gemv:
        return
    args = {"total": ctx.total, "experts": ctx.expert_count, "tile": ctx.tile, "max_blocks": ctx.max_blocks}
    b.emit(op.id, "routing", "route_plan",
           [b.bind(0, "expert_ids"), b.bind(1, "offsets", "w"), b.bind(2, "sorted_rows", "w"), b.bind(3, "row_pos", "w"),
            b.bind(4, "block_map", "w")], 5, "RouteArgs", args, (1, 1, 1), geo.ROUTE_THREADS)


def expert_linear(b: Builder, op: Op) -> None:
    """The routed (and joined shared) experts: one GEMV per (row, slot), or grouped GEMM over the block map (P1, P3)."""
    assert op.weight is not None
    g, c, ctx = b.ctx.groups[op.weight], b.config, b.ctx
    down = op.weight.endswith("experts_down")
    touched = min(1.0, ctx.total / max(1, g.experts))
    source, target = ("act", "expert_out") if down else ("x", "gate_up")
    bindings = [*weight_bindings(b, g, touched), b.bind(3, source), b.bind(4, target, "w")]
    macs = ctx.total * g.n * g.k
    if ctx.expert_gemv:
        args = {"rows": ctx.rows, "slots": ctx.slots, "n": g.n, "k": g.k, "ldx": g.k, "ldy": g.n, "per_slot": int(down),
                "experts": max(1, g.experts)}
        per_group = geo.moe_gemv_rows(g.n, g.k, g.bits)
        b.emit(op.id or "", "gemv", f"moe_gemv_bf16_{g.suffix}", [*bindings, b.bind(6, "expert_ids")], 5, "MoeGemvArgs",
               args, (-(-g.n // per_group), ctx.total, 1), geo.MOE_GEMV_THREADS, macs)
        return
    args = {"n": g.n, "k": g.k, "ldx": g.k, "ldy": g.n, "gather_slots": 0 if down else ctx.slots, "experts": max(1, g.experts)}
    b.emit(op.id, "grouped_gemm", f"grouped_gemm_bf16_{g.suffix}_m{ctx.tile}",
           [*bindings, b.bind(6, "block_map"), b.bind(7, "sorted_rows")], 5, "GroupedGemmArgs", args,
           (-(-g.n // geo.GEMM_COLUMNS), ctx.max_blocks, 1), geo.GEMM_THREADS, macs)


def silu_mul(b: Builder, op: Op) -> None:
    """Gated activation of the experts: act = SiLU(gate) * up, every (row, slot) a row."""
    shared = op.kind == "silu_mul_shared"
    width = b.config.shared_width if shared else b.config.expert_width
    rows = b.ctx.rows if shared else b.ctx.total
    source, target = ("shared_gate_up", "shared_act") if shared else ("gate_up", "act")
    b.emit(op.id, "activation", "silu_mul", [b.bind(0, source), b.bind(1, target, "w")], 2, "SiluMulArgs",
           {"rows": rows, "width": width, "ldx": 2 * width, "ldy": width},
           geo.elementwise(width, rows), geo.ELEMENTWISE_THREADS)


def moe_combine(b: Builder, op: Op) -> None:
    """h += the weighted sum of the slots' outputs, in slot order so that the sorted order never changes a result."""
    c, ctx = b.config, b.ctx
    bindings = [b.bind(0, "h", "rw"), b.bind(1, "expert_out"), b.bind(2, "expert_weights"), b.bind(3, "row_pos")]
    b.emit(op.id, "routing", "moe_combine", bindings, 4, "CombineArgs",
           {"rows": ctx.rows, "n": c.hidden_size, "slots": ctx.slots, "sorted": int(not ctx.expert_gemv)},
           geo.elementwise(c.hidden_size, ctx.rows), geo.ELEMENTWISE_THREADS)
