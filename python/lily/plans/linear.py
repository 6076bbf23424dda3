"""Lowering of the projections and of the mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from .. import policy
from ..graph import Op
from ..schedule import HOST, Binding, Region
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
        threads, groups = geo.gemv(g.n, g.k, b.ctx.capabilities.tuning)
        b.emit(op.id, "gemv", f"gemv_{kind}_{g.suffix}", bindings, 5, "GemvArgs", args, (groups, rows, 1), threads, macs)
    else:
        if expanded(b, op, g):
            bindings[:3] = [b.bind(0, "expanded", "r", 2 * g.n * g.k)]
        family, tile = matrix_family(b, "gemm"), policy.gemm_tile(rows, b.ctx.largest_tile)
        b.emit(op.id, family, f"{family}_{kind}_{matrix_suffix(b, g)}_m{tile}", bindings, 5, "GemmArgs", args,
               (-(-g.n // geo.tile_columns(tile, family)), -(-rows // tile), 1), geo.tile_threads(family), macs)


def matrix_family(b: Builder, family: str) -> str:
    """P6: the kernels of the matrix unit in use."""
    return policy.matrix_family(family, b.ctx.options.tensor_ops, b.ctx.capabilities)


def expanded(b: Builder, op: Op, g: Group) -> bool:
    """P1's control: the whole weight group is dequantised to scratch memory by a pass of its own. Whether that was done."""
    if b.ctx.options.fused_dequant or g.bits == 16:
        return False
    rows = max(1, g.experts) * g.n
    groups = geo.shared_out(-(-rows * g.k // (32 * 4 * geo.DEQUANTISE_THREADS)), b.ctx.capabilities.tuning)
    b.emit(f"{op.id}_dequantise", "dequantise", f"dequantise_{g.suffix}", [*weight_bindings(b, g), b.bind(3, "expanded", "w", 2 * rows * g.k)], 4,
           "DequantiseArgs", {"rows": rows, "k": g.k}, (groups, 1, 1), geo.DEQUANTISE_THREADS)
    return True


def matrix_suffix(b: Builder, g: Group) -> str:
    """Format of the operand that a matrix kernel reads."""
    return g.suffix if b.ctx.options.fused_dequant else "w16"


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
    """P2: histogram, scan, scatter and block map on the GPU, in its control on the CPU; not needed when every (row, slot)
    runs alone."""
    ctx = b.ctx
    family = "routing" if ctx.options.gpu_routing else HOST
    if ctx.expert_gemv:
        return
    lists = [b.bind(0, "expert_ids"), b.bind(1, "offsets", "w"), b.bind(2, "sorted_rows", "w"), b.bind(3, "row_pos", "w"), b.bind(4, "block_map", "w")]
    args: dict[str, float | int] = {"total": ctx.total, "experts": ctx.expert_count, "tile": ctx.tile, "max_blocks": ctx.max_blocks}
    if ctx.split_tiles:
        b.emit(op.id, family, "route_plan_split", [*lists, b.bind(6, "tail_map", "w")], 5, "RouteSplitArgs",
               {**args, "tail_tile": ctx.tail_tile, "max_tail": ctx.max_tail}, (1, 1, 1), geo.ROUTE_THREADS)
    else:
        b.emit(op.id, family, "route_plan", lists, 5, "RouteArgs", args, (1, 1, 1), geo.ROUTE_THREADS)


def expert_linear(b: Builder, op: Op) -> None:
    """The routed (and joined shared) experts: one GEMV per (row, slot), or grouped GEMM over the block map (P1, P3)."""
    assert op.weight is not None
    g, ctx = b.ctx.groups[op.weight], b.ctx
    down = op.weight.endswith("experts_down")
    source, target = ("act", "expert_out") if down else ("x", "gate_up")
    share = min(1.0, ctx.total / max(1, g.experts))
    if not ctx.expert_gemv:
        grouped_gemm(b, op, g, source, target, "bf16", g.n, 1, share)
        return
    args = {"rows": ctx.rows, "slots": ctx.slots, "n": g.n, "k": g.k, "ldx": g.k, "ldy": g.n, "per_slot": int(down), "experts": max(1, g.experts)}
    threads, groups = geo.gemv(g.n, g.k, ctx.capabilities.tuning)
    b.emit(op.id, "gemv", f"moe_gemv_bf16_{g.suffix}",
           [*weight_bindings(b, g, share), b.bind(3, source), b.bind(4, target, "w"), b.bind(6, "expert_ids")], 5, "MoeGemvArgs", args,
           (groups, ctx.total, 1), threads, ctx.total * g.n * g.k)


def expert_linear_silu(b: Builder, op: Op) -> None:
    """E5: gate and up with the activation as the epilogue."""
    assert op.weight is not None
    g = b.ctx.groups[op.weight]
    share = min(1.0, b.ctx.total / max(1, g.experts))
    grouped_gemm(b, op, g, "x", "act", "silu_bf16", b.config.expert_width, 2, share)


def grouped_gemm(b: Builder, op: Op, g: Group, source: str, target: str, kernel: str, n: int, rows_per_output: int, share: float) -> None:
    """One launch per tile list; `rows_per_output`: 2 with gate and up in one tile. With split lists (P3) the tail's smaller tiles run in the same level, on rows that the big
    list does not have; the weights that both read are counted once."""
    ctx = b.ctx
    weights = weight_bindings(b, g, share)
    if expanded(b, op, g):
        weights = [b.bind(0, "expanded", "r")]
    args = {"n": n, "k": g.k, "ldx": g.k, "ldy": n, "gather_slots": ctx.slots if source == "x" else 0, "experts": max(1, g.experts)}
    family = matrix_family(b, "grouped_gemm")
    lists = [("block_map", ctx.tile, ctx.max_blocks, "")] + ([("tail_map", ctx.tail_tile, ctx.max_tail, "_tail")] if ctx.split_tiles else [])
    for name, tile, blocks, suffix in lists:
        write = Binding(4, b.region(target), "w", None if not suffix else 0, op.id)
        b.emit(op.id + suffix, family, f"{family}_{kernel}_{matrix_suffix(b, g)}_m{tile}",
               [*(weights if not suffix else [replace(w, touched=0) for w in weights]), b.bind(3, source), write, b.bind(6, name),
                b.bind(7, "sorted_rows")], 5, "GroupedGemmArgs", args,
               (-(-n * rows_per_output // geo.tile_columns(tile, family)), blocks, 1), geo.tile_threads(family), ctx.total * g.n * g.k if not suffix else 0)


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
