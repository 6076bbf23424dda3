"""Lowering of Gated DeltaNet and of attention."""

from __future__ import annotations

import math

from .. import policy
from ..graph import Op
from . import geometry as geo
from .context import Builder, row_stride


def gdn_conv_silu(b: Builder, op: Op) -> None:
    c, ctx = b.config, b.ctx
    ring = f"conv.{op.layer}"
    slot = b.region(ring).nbytes // 3
    g = ctx.groups[f"layers.{op.layer}.gdn_in"]
    b.emit(op.id, "gdn", "gdn_conv_silu",
           [b.bind(0, "proj", "r", 2 * ctx.rows * c.conv_channels), b.bind(1, f"p:layers.{op.layer}.conv1d"),
            b.bind(2, ring, "rw", slot), b.bind(3, "conv", "w"), b.bind(4, "step")], 5, "ConvArgs",
           {"rows": ctx.rows, "channels": c.conv_channels, "taps": c.conv_taps, "ldp": row_stride(g), "ring_stride": slot // 2},
           geo.conv_grid(c.conv_channels, ctx.rows), geo.CONV_THREADS)


def gdn_qk_norm(b: Builder, op: Op) -> None:
    c, ctx = b.config, b.ctx
    touched = 2 * ctx.rows * 2 * c.k_heads * c.dk
    b.emit(op.id, "gdn", "gdn_qk_norm", [b.bind(0, "conv", "rw", touched)], 1, "QkNormArgs",
           {"rows": ctx.rows, "heads": c.k_heads, "head_dim": c.dk, "ldc": c.conv_channels},
           geo.qk_norm_grid(2 * c.k_heads, ctx.rows), geo.QK_NORM_THREADS)


def gdn_gates(b: Builder, op: Op) -> None:
    c, ctx, p = b.config, b.ctx, f"layers.{op.layer}"
    own = op.reads[0] == "ba"
    g = ctx.groups[f"{p}.gdn_ba" if own else f"{p}.gdn_in"]
    source = b.region("ba" if own else "proj")
    touched = 2 * ctx.rows * c.v_heads
    b.emit(op.id, "gdn", "gdn_gates",
           [b.bind(0, source.slice(2 * g.offsets["b"]), "r", touched), b.bind(1, source.slice(2 * g.offsets["a"]), "r", touched),
            b.bind(2, f"p:{p}.A_log"), b.bind(3, f"p:{p}.dt_bias"), b.bind(4, "beta", "w"), b.bind(5, "decay", "w")],
           6, "GatesArgs", {"rows": ctx.rows, "heads": c.v_heads, "ldb": row_stride(g), "lda": row_stride(g)},
           geo.flat(ctx.rows * c.v_heads), geo.ELEMENTWISE_THREADS)


def gdn_scan(b: Builder, op: Op) -> None:
    """P4: the state stays in registers over the rows of the pass and is written once at the end."""
    c, ctx = b.config, b.ctx
    ring = f"gdn.{op.layer}"
    slot = b.region(ring).nbytes // 3
    family = policy.scan_kernel(ctx.rows, ctx.options.register_scan, ctx.options.chunked_gdn and ctx.phase == "prefill")
    function = {"gdn": "gdn_scan", "gdn_chunk": "gdn_chunk", "gdn_blockwise": "gdn_scan_blockwise"}[family]
    grid, threads = geo.scan_grid(c.dv, c.v_heads), geo.SCAN_THREADS
    if family != "gdn":
        grid, threads = geo.chunk_scan_grid(c.dv, c.v_heads), geo.CHUNK_SCAN_THREADS
    b.emit(op.id, family, f"{function}_d{c.dk}",
           [b.bind(0, "conv"), b.bind(1, "decay"), b.bind(2, "beta"), b.bind(3, ring, "rw", slot), b.bind(4, "scan", "w"),
            b.bind(5, "step")], 6, "ScanArgs",
           {"rows": ctx.rows, "k_heads": c.k_heads, "v_heads": c.v_heads, "dk": c.dk, "dv": c.dv, "ldc": c.conv_channels, "ring_stride": slot // 4},
           grid, threads, macs=2 * ctx.rows * c.v_heads * c.dv * c.dk)


def gdn_gated_norm(b: Builder, op: Op) -> None:
    c, ctx, p = b.config, b.ctx, f"layers.{op.layer}"
    g = ctx.groups[f"{p}.gdn_in"]
    touched = 2 * ctx.rows * c.v_heads * c.dv
    b.emit(op.id, "gdn", "gdn_gated_norm",
           [b.bind(0, "scan"), b.bind(1, b.region("proj").slice(2 * g.offsets["z"]), "r", touched),
            b.bind(2, f"p:{p}.gdn_norm"), b.bind(3, "mix", "w", touched)], 4, "GatedNormArgs",
           {"rows": ctx.rows, "heads": c.v_heads, "dv": c.dv, "ldz": row_stride(g), "eps": c.rms_norm_eps},
           geo.qk_norm_grid(c.v_heads, ctx.rows), geo.QK_NORM_THREADS)


def attn_prepare(b: Builder, op: Op) -> None:
    """Query and key norm, RoPE, split and cache write in one launch."""
    c, ctx, p = b.config, b.ctx, f"layers.{op.layer}"
    g = ctx.groups[f"{p}.attn_in"]
    written, lanes = 2 * ctx.rows * c.kv_heads * c.head_dim, ctx.capabilities.tuning.head_lanes
    b.emit(op.id, geo.ATTN_PREPARE_FAMILY, "attn_prepare",
           [b.bind(0, "proj"), b.bind(1, f"p:{p}.q_norm"), b.bind(2, f"p:{p}.k_norm"), b.bind(3, "p:rope_lo", "r", 0),
            b.bind(4, "p:rope_hi", "r", 0), b.bind(5, "q", "w"), b.bind(6, f"kv_k.{op.layer}", "w", written),
            b.bind(7, f"kv_v.{op.layer}", "w", written), b.bind(8, "step")], 9, "AttnPrepareArgs",
           {"rows": ctx.rows, "q_heads": c.q_heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim,
            "rotary_dim": c.rotary_dim, "ldp": row_stride(g), "k_offset": g.offsets["k"], "v_offset": g.offsets["v"],
            "rope_lo_rows": geo.ROPE_LO_ROWS, "eps": c.rms_norm_eps},
           geo.prepare_grid(c.q_heads + 2 * c.kv_heads, ctx.rows, lanes), geo.PREPARE_THREADS, 0, ((5, "bool", True),) if lanes == 32 else ())


def attention(b: Builder, op: Op) -> None:
    """Causal attention: matrix tiles for several rows; for one row a general path or a split over key blocks (D7)."""
    c, ctx = b.config, b.ctx
    keys = 2 * ctx.context * c.kv_heads * c.head_dim
    blocks, tuning = ctx.key_blocks, ctx.capabilities.tuning
    pack = policy.head_pack(c.q_heads, c.kv_heads, ctx.options.gqa_packing)
    packed = "_packed" if ctx.options.gqa_packing else ""
    switches: tuple[tuple[int, str, bool | int], ...] = () if ctx.options.coalesced_kv else ((1, "bool", True),)  # D5's control
    if tuning.tile_keys != 64:
        switches += ((4, "uint", tuning.tile_keys),)
    args = {"rows": ctx.rows, "q_heads": c.q_heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "blocks": blocks,
            "scale": 1.0 / math.sqrt(c.head_dim)}
    # Without packing (D6) every query head of a KV head loads its rows again; the caches may hide that, the kernel asks for it.
    k, v = b.bind(1, f"kv_k.{op.layer}", "r", keys), b.bind(2, f"kv_v.{op.layer}", "r", keys)
    macs = 2 * ctx.rows * c.q_heads * ctx.context * c.head_dim
    if ctx.phase == "prefill":
        b.emit(op.id, geo.ATTN_PREFILL_FAMILY, "attn_prefill", [b.bind(0, "q"), k, v, b.bind(3, "mix", "w"), b.bind(4, "step")], 5, "AttnArgs",
               args, (c.q_heads, -(-ctx.rows // geo.ATTN_QUERIES), 1), geo.ATTN_PREFILL_THREADS, macs, ((0, "uint", c.head_dim),))
    elif blocks == 1:
        b.emit(op.id, geo.ATTN_DECODE_FAMILY, f"attn_decode{packed}", [b.bind(0, "q"), k, v, b.bind(3, "mix", "w"), b.bind(4, "step")], 5, "AttnArgs",
               args, (c.q_heads // pack, 1, 1), tuning.decode_threads, macs, switches)
    else:
        b.emit(op.id, geo.ATTN_DECODE_FAMILY, f"attn_decode{packed}_split", [b.bind(0, "q"), k, v, b.bind(3, "attn_partial", "w"), b.bind(4, "step")],
               5, "AttnArgs", args, (c.q_heads // pack, blocks, 1), tuning.split_threads, macs, switches)
        b.emit(f"{op.id}_combine", geo.ATTN_DECODE_FAMILY, "attn_decode_combine", [b.bind(0, "attn_partial"), b.bind(1, "mix", "w"), b.bind(2, "step")],
               3, "AttnArgs", args, (c.q_heads, tuning.combine_parts, 1), geo.ATTN_COMBINE_THREADS)


def output_gate(b: Builder, op: Op) -> None:
    c, ctx = b.config, b.ctx
    g = ctx.groups[f"layers.{op.layer}.attn_in"]
    width = c.q_heads * c.head_dim
    b.emit(op.id, "activation", "output_gate", [b.bind(0, "mix", "rw", 2 * ctx.rows * width), b.bind(1, "proj", "r", 2 * ctx.rows * width)], 2,
           "OutputGateArgs", {"rows": ctx.rows, "heads": c.q_heads, "head_dim": c.head_dim, "ldp": row_stride(g)},
           geo.elementwise(width, ctx.rows), geo.ELEMENTWISE_THREADS)
