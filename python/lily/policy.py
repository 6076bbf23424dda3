"""Kernel selection: pure functions of (phase, rows, dims, context, capabilities), thresholds in one table.

Nothing here touches a device or knows its brand: `Capabilities` holds what the functions may depend on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Launch shapes of a kind of device. Row APPLE comes from the article, MLX and ggml and is never changed by figures from
    other devices; those have rows of their own.

    small_threads: threads of the GEMV family; max_groups: threadgroups over which rows are shared out (0 = by rows alone);
    decode_threads, split_threads: threads of decode attention; step_blocks: threadgroups a value head of gdn_step
    (0 = one per 32 columns); tile_rows: rows of the largest matrix tile on tensor operations (32 or 64);
    solo_tiles: matrix tiles on tensor operations are one simdgroup's instead of four's;
    lane_blocks: neighbouring blocks of 32 weights that a thread of a fused GEMV may take in a step; whole_rows: it takes whole rows where
    its prologue is cheap (rows_gemv.h); prefetch_rows: it asks for the next rows early (kPrefetchSwitch in team_gemv.h); team_groups:
    threadgroups over which its rows are shared at most (0 = by rows alone); out_rows: rows a threadgroup of the output projections;
    gate_up_columns: columns of an expert a threadgroup; head_lanes: lanes a head of attn_prepare (4 or 32); tile_keys: keys that a
    simdgroup of decode attention takes at a time (16, 32, 64); block_keys: keys of a block of its general split (128: 80 threadgroups
    from 2,560 keys on at four packs of query heads); fixed_blocks: blocks of D7."""

    small_threads: int = 64
    max_groups: int = 0
    decode_threads: int = 256
    split_threads: int = 128
    step_threads: int = 64
    step_blocks: int = 0
    combine_parts: int = 4
    tile_rows: int = 32
    solo_tiles: bool = False
    lane_blocks: int = 1
    whole_rows: bool = False
    prefetch_rows: bool = False
    team_groups: int = 0
    out_rows: int = 16
    gate_up_columns: int = 8
    head_lanes: int = 4
    tile_keys: int = 64
    block_keys: int = 128
    fixed_blocks: int = 128


APPLE = Tuning()
# Few cores that run one threadgroup at a time each: a thread start costs as much as a row, so few and narrow threadgroups
# (measured on two x86-64 cores: GEMV of 6144 x 256 four times as fast with 8 groups of 32 as with 192 of 64). Expanding weights
# costs about what multiplying 32 rows by them does: 64-row tiles are 1.6 to 1.9 times as fast (256 x 512 x 2048).
FEW_CORES = Tuning(small_threads=32, max_groups=16, decode_threads=64, split_threads=32, step_threads=32, step_blocks=1, combine_parts=1,
                   tile_rows=64, solo_tiles=True, lane_blocks=8, whole_rows=True)
# Matrix units that outrun the operands' way to them: a 64 x 128 tile reads each operand half as often (H200, experts of the 35B at
# 4,096 tokens: 0.86 ms for gate and up in 64-row tiles, 1.14 ms in 32-row tiles). More simdgroups than a decode step can fill, and memory
# further away than their arithmetic takes: rows asked for early, small blocks of keys, a simdgroup a head (H200, 35B at 4,096 tokens, us a
# launch with and without: input projection 9.3 / 16.5, head 109 / 173, split attention 16 / 28, attn_prepare 3.8 / 5.9, gdn_step 4.8 / 5.2).
# 256 threadgroups of attention are all resident there, 512 are not: 64 blocks decode 412 tok/s at 32K, 128 blocks 389.
WIDE_TILES = Tuning(tile_rows=64, prefetch_rows=True, out_rows=8, team_groups=1056, step_blocks=8, head_lanes=32, tile_keys=32, block_keys=64,
                    fixed_blocks=64)
TUNING = {"metal": APPLE, "cpu": FEW_CORES, "cuda": WIDE_TILES}


@dataclass(frozen=True)
class Capabilities:
    """What policy may know of a device."""

    tuning: Tuning = APPLE
    tensor_ops: bool = False  # matrix hardware behind matmul2d, whose kernels compile and pass their self-test (P6)
    unified_memory: bool = True  # the CPU sees the memory that kernels work on
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
    # The same for 64-row tiles, where the device's tuning has them: below, most experts would fill half of one.
    tile64_min_mean_rows: float = 40.0
    # Up to so many keys the threadgroups of the KV heads walk all keys alone: a split would add a stage (about 4.3 µs on an
    # M5 Max) to save less. Above, a stage that reads over a megabyte must fill 40 cores twice.
    attention_split_min_keys: int = 256
    attention_max_blocks: int = 64
    # D7: from here on a fixed number of equal blocks (Tuning.fixed_blocks); the article switches at 32K.
    fixed_block_min_keys: int = 32768
    # P4: chunks of 16 rows on matrix tiles win from one full chunk on (kRows in gdn_chunk.metal).
    chunked_gdn_min_rows: int = 16
    # P5: 2,048 rows keep the arena of the 35B below 200 MB and reach the flat part of the prefill curve (MLX-LM's choice).
    chunk_rows: int = 2048
    # Prefix cache: a snapshot of the 35B takes as much as the KV rows of 3,200 tokens, so every second chunk end keeps one.
    snapshot_stride: int = 4096
    # Cutting a prompt costs a pass of its own over the weights, about the time of so many prompt tokens.
    snapshot_min_rows: int = 256
    # Shorter texts that are no conversation are computed again faster than a snapshot pays.
    snapshot_min_text: int = 32
    # Logits of every row (teacher forcing) are float32 x vocabulary: bound that buffer.
    logits_bytes: int = 64 << 20


THRESHOLDS = Thresholds()


def use_gemv(phase: str, rows: int, t: Thresholds = THRESHOLDS) -> bool:
    """D1: vector execution in decode. A prompt runs on matrix tiles whatever the rows of a chunk are, so that its state does
    not depend on how it was cut: a tile rounds weights to bf16, a GEMV does not."""
    return phase == "decode" and rows <= t.gemv_max_rows


def largest_tile(tensor_ops: bool, c: Capabilities) -> int:
    """P6: rows of the largest matrix tile: what the device's tuning says on tensor operations, 32 on simdgroup matrices."""
    return c.tuning.tile_rows if use_tensor_ops(tensor_ops, c) else 32


def use_tensor_ops(enabled: bool, c: Capabilities) -> bool:
    """P6: matmul2d where the device has it and the switch is on."""
    return enabled and c.tensor_ops


def matrix_family(family: str, tensor_ops: bool, c: Capabilities) -> str:
    """P6: the family that holds a matrix kernel for the unit in use: `gemm` or `gemm_tensor`, and so on. Names of its kernels begin with it."""
    return tensor_family(family, c.tuning) if use_tensor_ops(tensor_ops, c) else family


def tensor_family(family: str, tuning: Tuning) -> str:
    """P6: the family of a matrix kernel on tensor operations, in tiles as the device's tuning wants them."""
    return f"{family}_solo_tensor" if tuning.solo_tiles else f"{family}_tensor"


def gemm_tile(rows: int, largest: int = 32) -> int:
    """Rows of a tile of a dense product: the largest that `rows` fill more than half of, at least 32."""
    return 64 if largest >= 64 and rows > 32 else 32


def expert_tile(rows: int, top_k: int, experts: int, tile_by_load: bool, largest: int = 32, t: Thresholds = THRESHOLDS) -> int:
    """P3: rows of a grouped-GEMM tile, from the mean rows per expert; 16 always in the control."""
    mean = rows * top_k / experts
    if not tile_by_load or mean < t.tile32_min_mean_rows:
        return 16
    return 64 if largest >= 64 and mean >= t.tile64_min_mean_rows else 32


def block_map_size(total: int, tile: int, experts: int) -> int:
    """Upper bound of the blocks that `total` sorted rows over `experts` need: ceil(S / T) + min(E, S)."""
    return -(-total // tile) + min(experts, total)


def attention_blocks(context: int, fixed_blocks: bool = True, tuning: Tuning = APPLE, t: Thresholds = THRESHOLDS) -> int:
    """Key blocks of decode attention for contexts up to `context`; 1 = one threadgroup walks all keys of its heads. From
    32K on the fixed-block path (D7), in its control the general path's split."""
    if context <= t.attention_split_min_keys:
        return 1
    if fixed_blocks and context >= t.fixed_block_min_keys:
        return tuning.fixed_blocks
    return min(t.attention_max_blocks, -(-context // tuning.block_keys))


def fixed_block_shape(head_dim: int, q_heads: int, kv_heads: int) -> bool:
    """D7 holds for the shape it was measured with: head_dim 256, eight query heads a KV head."""
    return head_dim == 256 and q_heads == 8 * kv_heads


def head_pack(q_heads: int, kv_heads: int, enabled: bool) -> int:
    """D6: query heads of one KV head that a threadgroup serves: the largest of 4, 3, 2, 1 that divides them."""
    if not enabled:
        return 1
    group = q_heads // kv_heads
    return next(p for p in (4, 3, 2, 1) if group % p == 0)


def scan_kernel(rows: int, register_scan: bool, chunked: bool, t: Thresholds = THRESHOLDS) -> str:
    """P4: family of the recurrence: `gdn_chunk` on matrix tiles, `gdn` with the state in registers, or the control."""
    if not register_scan:
        return "gdn_blockwise"
    return "gdn_chunk" if chunked and rows >= t.chunked_gdn_min_rows else "gdn"


def context_range(keys: int, t: Thresholds = THRESHOLDS) -> int:
    """Upper end of the context range that `keys` falls in: a decode program is recorded per range (powers of two)."""
    end = t.attention_split_min_keys
    while end < keys:
        end *= 2
    return end


def chunk_size(rows: int, requested: int | None, t: Thresholds = THRESHOLDS) -> int:
    """P5: prompt rows of the next chunk."""
    return min(rows, requested if requested is not None else t.chunk_rows)


def snapshot_positions(start: int, length: int, message: int, turn: int, known: int, t: Thresholds = THRESHOLDS) -> list[int]:
    """Token counts at which a prompt of `length` tokens, resumed at `start`, is cut so that a snapshot can be taken.

    Always at the end of the user turn (`turn`, 0 = none), or one token before the end, so that an exact repeat computes as
    little as it can; at fixed strides; and, where enough rows lie before it, at the start of the last message, at the end of
    what an earlier prompt had in common with this one (`known`), and, in text without turns, at an aligned place before the
    end: there a changed tail resumes.
    """
    last = length - 1
    found = set(range(t.snapshot_stride, length, t.snapshot_stride))
    if turn or length >= t.snapshot_min_text:
        found.add(min(turn or last, last))
    far = [message, known]
    if not turn:
        far.append((last - t.snapshot_min_rows // 4) // t.snapshot_min_rows * t.snapshot_min_rows)
    found.update(at for at in far if at - start >= t.snapshot_min_rows)
    return sorted(at for at in found if start < at <= last)


def logits_chunk(rows: int, vocab: int, requested: int | None, t: Thresholds = THRESHOLDS) -> int:
    """Rows per chunk when every row's logits are wanted: bounded by the bytes of the float32 logits."""
    return max(1, min(chunk_size(rows, requested, t), t.logits_bytes // (4 * vocab)))


def argmax_blocks(vocab: int) -> int:
    """Threadgroups of the first argmax launch: about 4,096 logits each, so that 248,320 spread over 61."""
    return max(1, min(128, -(-vocab // 4096)))
