"""Kernel selection: pure functions of (phase, rows, dims, context, capabilities), thresholds in one table.

Nothing here touches a device or knows its brand: `Capabilities` holds what the functions may depend on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capabilities:
    """What policy may know of a device."""

    tensor_ops: bool = False
    max_threads: int = 1024
    working_set: int = 1 << 62
    max_buffer_length: int = 1 << 62


@dataclass(frozen=True)
class Thresholds:
    """Every tuning edge, with the reason it stands where it does."""

    # Outside prefill: a GEMV reads the weights once per row, a 32-row matrix tile once per 32 rows at the cost of padding;
    # up to this many rows the padding costs more than the extra reads (llama.cpp and MLX switch between 4 and 8 rows).
    gemv_max_rows: int = 4
    # P3: mean rows per expert from which a 32-row tile is filled well enough; fewer rows waste half of it.
    tile32_min_mean_rows: float = 12.0
    # One threadgroup per query head walks this many keys alone before a split over threadgroups is worth its second
    # launch (one stage costs about 4.3 µs on an M5 Max, about the time to read 1,024 KV rows by one threadgroup).
    attention_split_min_keys: int = 1024
    # Keys per split block: long enough to amortise the combine, short enough to fill 40 cores at 16K.
    attention_keys_per_block: int = 512
    attention_max_blocks: int = 64
    # P5: 2,048 rows keep the arena of the 35B below 200 MB and reach the flat part of the prefill curve (MLX-LM's choice).
    chunk_rows: int = 2048
    # Logits of every row (teacher forcing) are float32 x vocabulary: bound that buffer.
    logits_bytes: int = 64 << 20


THRESHOLDS = Thresholds()


def use_gemv(phase: str, rows: int, t: Thresholds = THRESHOLDS) -> bool:
    """D1: vector execution in decode. A prompt runs on matrix tiles whatever the rows of a chunk are, so that its state does
    not depend on how it was cut: a tile rounds weights to bf16, a GEMV does not."""
    return phase == "decode" and rows <= t.gemv_max_rows


def expert_tile(rows: int, top_k: int, experts: int, tile_by_load: bool, t: Thresholds = THRESHOLDS) -> int:
    """P3: rows of a grouped-GEMM tile, from the mean rows per expert; 16 always in the control."""
    if not tile_by_load:
        return 16
    return 32 if rows * top_k / experts >= t.tile32_min_mean_rows else 16


def block_map_size(total: int, tile: int, experts: int) -> int:
    """Upper bound of the blocks that `total` sorted rows over `experts` need: ceil(S / T) + min(E, S)."""
    return -(-total // tile) + min(experts, total)


def attention_blocks(context: int, t: Thresholds = THRESHOLDS) -> int:
    """Key blocks of decode attention for contexts up to `context`; 1 = the general path of one threadgroup a head."""
    if context <= t.attention_split_min_keys:
        return 1
    return min(t.attention_max_blocks, -(-context // t.attention_keys_per_block))


def context_range(keys: int, t: Thresholds = THRESHOLDS) -> int:
    """Upper end of the context range that `keys` falls in: a decode program is recorded per range (powers of two)."""
    end = t.attention_split_min_keys
    while end < keys:
        end *= 2
    return end


def chunk_size(rows: int, requested: int | None, t: Thresholds = THRESHOLDS) -> int:
    """P5: prompt rows of the next chunk."""
    return min(rows, requested if requested is not None else t.chunk_rows)


def logits_chunk(rows: int, vocab: int, requested: int | None, t: Thresholds = THRESHOLDS) -> int:
    """Rows per chunk when every row's logits are wanted: bounded by the bytes of the float32 logits."""
    return max(1, min(chunk_size(rows, requested, t), t.logits_bytes // (4 * vocab)))


def argmax_blocks(vocab: int) -> int:
    """Threadgroups of the first argmax launch: about 4,096 logits each, so that 248,320 spread over 61."""
    return max(1, min(128, -(-vocab // 4096)))
