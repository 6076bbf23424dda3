"""Launch geometry: threads per threadgroup and what a threadgroup covers.

Every value here has its twin in a kernel; the comment names it. A grid is always in threadgroups.
"""

from __future__ import annotations

from ..policy import Tuning

Grid = tuple[int, int, int]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


# gemv.metal: kGemvThreads (at most), kRowsPerPass; each simdgroup takes kRowsPerPass rows for each of its lane groups.
_GEMV_ROWS_PER_PASS = 4


def shared_out(groups: int, tuning: Tuning) -> int:
    """Threadgroups for kernels that share their rows out over any number of them."""
    return min(groups, tuning.max_groups) if tuning.max_groups else groups


def gemv(n: int, k: int, tuning: Tuning) -> tuple[int, int]:
    """(threads, groups): k / 32 lanes (a power of two, at most 32) share a row, the rest take more rows."""
    lanes = 1
    while lanes < k // 32 and lanes < 32:
        lanes *= 2
    rows = _GEMV_ROWS_PER_PASS * (32 // lanes) * (tuning.small_threads // 32)
    return tuning.small_threads, shared_out(_ceil(n, rows), tuning)


def team_threads(k: int, most: int, tuning: Tuning) -> int:
    """team_gemv.h: all threads of a group share each row, 32 inputs a thread."""
    return 32 if k <= 1024 or tuning.max_groups else min(most, 32 * _ceil(k, 1024))


def team_constants(k: int, tuning: Tuning) -> tuple[tuple[int, str, bool | int], ...]:
    """team_gemv.h: kLaneBlocksSwitch, so that rows of k inputs still occupy kMinLanes lanes, and kPrefetchSwitch, where they are not the default."""
    blocks = 1
    while 2 * blocks <= min(tuning.lane_blocks, k // (32 * 8)):
        blocks *= 2
    if blocks > 1:
        return ((2, "uint", blocks),)
    return ((3, "bool", True),) if tuning.prefetch_rows else ()


def team_groups(outputs: int, per_group: int, tuning: Tuning) -> int:
    """team_gemv.h: any number of threadgroups is right; they take equal shares."""
    groups, most = _ceil(outputs, per_group), tuning.max_groups or tuning.team_groups
    return min(groups, most) if most else groups


# rows_gemv.h: kMostRowBlocks; rows that a thread takes at least, so that its inputs are worth their price.
_MOST_ROW_BLOCKS, _ROWS_A_THREAD = 144, 8


def row_job(outputs: int, rows_per_output: int, k: int, groups: int, tuning: Tuning) -> tuple[int, tuple[tuple[int, str, bool | int], ...]]:
    """(threadgroups of 32 threads, constants) of a job of team_gemv.h whose inputs cost little: whole rows a thread where the tuning
    wants them, over at most `groups` threadgroups, else `groups` and `team_constants`."""
    if not tuning.whole_rows or k > 32 * _MOST_ROW_BLOCKS:
        return groups, team_constants(k, tuning)
    return min(groups, _ceil(outputs * rows_per_output, 32 * _ROWS_A_THREAD)), ((2, "uint", 0),)


# fused_projection.metal, moe_decode.metal: most threads, outputs a group when a GPU is to be filled.
NORM_GEMV_THREADS, OUT_THREADS, GATE_UP_THREADS, DOWN_THREADS = 64, 128, 64, 160
TEAM_ROWS, ROUTER_ROWS = 16, 4

# tile.h: kTileThreads, tile_columns; tile_tensor.h: TensorTile of 32 threads.
GEMM_THREADS, SOLO_THREADS = 128, 32


def tile_threads(family: str) -> int:
    return SOLO_THREADS if "_solo_" in family else GEMM_THREADS


def tile_columns(rows: int, family: str = "") -> int:
    return 128 if rows > 32 and tile_threads(family) == GEMM_THREADS else 64


# routing.metal
TOPK_ROWS, TOPK_THREADS = 1, 32
ROUTE_THREADS = 256

# activation.metal, routing.metal: eight columns a thread.
ELEMENTWISE_THREADS = 64
_COLUMNS_PER_GROUP = 8 * ELEMENTWISE_THREADS


def elementwise(width: int, rows: int) -> Grid:
    return (_ceil(width, _COLUMNS_PER_GROUP), rows, 1)


# embed.metal: a threadgroup strides over the blocks of one row.
EMBED_THREADS = 64


def embed_grid(hidden: int, rows: int) -> Grid:
    return (1, rows, 1)

# norm.metal: one threadgroup per row, at most 256 threads; sixteen columns a thread keep the reduction short.
def norm_threads(n: int) -> int:
    return min(256, _ceil(n, 16 * 32) * 32)


# gdn.metal: kConvRows; eight channels a thread. Norms, gates and attn_prepare: a quad (kQuad) of lanes per head of a row.
CONV_THREADS = 64
_CONV_ROWS = 32
QK_NORM_THREADS = PREPARE_THREADS = 64
_QUAD = 4


def conv_grid(channels: int, rows: int) -> Grid:
    return (_ceil(channels, 8 * CONV_THREADS), _ceil(rows, _CONV_ROWS), 1)


def qk_norm_grid(heads: int, rows: int) -> Grid:
    return (_ceil(rows * heads * _QUAD, QK_NORM_THREADS), 1, 1)


def prepare_grid(heads: int, rows: int, lanes: int = _QUAD) -> Grid:
    """attention_prepare.metal: `lanes` (head_lanes) a head of a row."""
    return (_ceil(rows * heads * lanes, PREPARE_THREADS), 1, 1)


def flat(count: int) -> Grid:
    """One thread per element."""
    return (_ceil(count, ELEMENTWISE_THREADS), 1, 1)


# gdn.metal: kQuads columns a simdgroup. One simdgroup a threadgroup: 512 groups at the 35B's 32 heads x 128 columns.
SCAN_THREADS = 32
_SCAN_COLUMNS = 8


def scan_grid(dv: int, heads: int) -> Grid:
    return (dv // _SCAN_COLUMNS, heads, 1)


# gdn_chunk.metal, gdn_blockwise.metal: eight columns a simdgroup, a column a quad.
CHUNK_SCAN_THREADS = 128


def chunk_scan_grid(dv: int, heads: int) -> Grid:
    return (_ceil(dv, CHUNK_SCAN_THREADS // _QUAD), heads, 1)


# gdn_step.metal: columns of a block are a multiple of 16, 32 fill a GPU with 128 threadgroups.
def step_grid(dv: int, heads: int, tuning: Tuning) -> Grid:
    return (tuning.step_blocks or max(1, dv // 32), heads, 1)


def scan_norm_threads(tuning: Tuning) -> int:
    return 32 if tuning.max_groups else 256


# attention_prepare.metal, attention_decode.metal (kMaxSimdgroups), attention_prefill.metal (8 query rows a simdgroup).
ATTN_PREPARE_FAMILY, ATTN_DECODE_FAMILY, ATTN_PREFILL_FAMILY = "attention_prepare", "attention_decode", "attention_prefill"
ROPE_LO_ROWS = 512
ATTN_COMBINE_THREADS = 64
ATTN_PREFILL_THREADS = 128
ATTN_QUERIES = 32

# sampling.metal: finish is one simdgroup exactly.
ARGMAX_THREADS = 128
SAMPLE_THREADS = 256
ADJUST_THREADS = 256
LOGPROBS_THREADS = 256
FINISH_THREADS = 32
ADVANCE_THREADS = 32

# dequantise.metal: 32 weights a thread and step.
DEQUANTISE_THREADS = 64
