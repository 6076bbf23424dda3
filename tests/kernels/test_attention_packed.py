"""D5, D6, D7 of decode attention: packed heads, split keys, strided loads and the gate in the epilogue.

Caches end at the last key, so a read past it is out of bounds; outputs start as NaN.
"""

from functools import cache, partial as bound

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import bf16, f32, poison, run
from tests.reference import attention
from tests.reference.numbers import step_state

TINY, REAL = (8, 1, 256), (16, 2, 256)   # query heads, KV heads, head dim
SHORT, LONG = (1, 255, 256, 257, 1000), (8_191, 32_767, 32_768, 33_000, 131_072)
STRIDED = {1: ("bool", True)}
FAMILY = "attention_decode"

all_contexts = pytest.mark.parametrize("keys", [*SHORT, *(pytest.param(n, marks=pytest.mark.slow) for n in LONG)])
both_dims = pytest.mark.parametrize("dims", [TINY, REAL])


def pack_of(dims: tuple[int, int, int]) -> int:
    """Up to four query heads of one KV head."""
    group = dims[0] // dims[1]
    return next(p for p in (4, 3, 2, 1) if group % p == 0)


@cache
def random_rows(count: int) -> np.ndarray:
    return bf16(np.random.default_rng(count).normal(0, 1, (count, 256)))


def case(dims, keys, blocks=1):
    """q, K, V, out, step and args; long caches repeat 1,024 random rows in two different orders."""
    heads, kv_heads, dim = dims
    rng = np.random.default_rng(keys)
    rows = random_rows(1024)[:, :dim]
    k, v = (rows[rng.integers(0, 1024, keys * kv_heads)].reshape(keys, kv_heads * dim) for _ in range(2))
    q = bf16(rng.normal(0, 1, heads * dim))
    args = ("AttnArgs", {"rows": 1, "q_heads": heads, "kv_heads": kv_heads, "head_dim": dim, "blocks": blocks, "scale": dim**-0.5})
    return [q, k, v, poison(heads * dim, np.uint16), step_state(position=keys - 1)], args


def gates(dims, seed=5):
    return bf16(np.random.default_rng(seed).normal(0, 2, 2 * dims[0] * dims[2] + 64))


def launch(function, buffers, args, grid, threads, constants=None):
    """The kernel alone, outputs in place."""
    buffers = dict(enumerate(buffers[:5])) | dict(enumerate(buffers[5:], 6))
    run(FAMILY, function, buffers, args, 5, (*grid, 1, 1)[:3], (threads, 1, 1), constants)


def blocks_of(keys: int) -> int:
    return min(64, max(4, keys // 512))


@all_contexts
@both_dims
def test_packed_heads_give_the_same_bytes(dims, keys):
    """D6: general and split form, each against one query head per threadgroup."""
    (q, k, v, out, step), args = case(dims, keys, blocks_of(keys))
    alone, packed = out.copy(), out.copy()
    launch("attn_decode", [q, k, v, alone, step], args, (dims[0],), 128)
    launch("attn_decode_packed", [q, k, v, packed, step], args, (dims[0] // pack_of(dims),), 128)
    np.testing.assert_array_equal(packed, alone)
    blocks = args[1]["blocks"]
    partial = [poison((dims[0], blocks, dims[2] + 2), np.float32) for _ in range(2)]
    launch("attn_decode_split", [q, k, v, partial[0], step], args, (dims[0], blocks), 64)
    launch("attn_decode_packed_split", [q, k, v, partial[1], step], args, (dims[0] // pack_of(dims), blocks), 64)
    np.testing.assert_array_equal(partial[1].view(np.uint32), partial[0].view(np.uint32))


@all_contexts
@both_dims
def test_case_34_packed_against_repeated_kv(dims, keys):
    """Case 34: every query head against its own copy of the KV head, in float64."""
    buffers, args = case(dims, keys)
    check(FAMILY, "attn_decode_packed", attention.attn_decode_packed, buffers, args, (dims[0] // pack_of(dims),), 256, atol=2**-8)


@all_contexts
@both_dims
def test_fixed_blocks_with_gate(dims, keys):
    """D7: blocks in parallel, packed, then the combine with the gate; the same answer as the general path."""
    (q, k, v, out, step), args = case(dims, keys, blocks_of(keys))
    blocks, heads, dim, proj = args[1]["blocks"], dims[0], dims[2], gates(dims)
    partial = poison((heads, blocks, dim + 2), np.float32)
    grid = (heads // pack_of(dims), blocks)
    split = check(FAMILY, "attn_decode_packed_split", attention.attn_decode_packed_split, [q, k, v, partial, step], args, grid, 128, rtol=1e-4, atol=1e-5)
    joined = check(FAMILY, "attn_combine_gate", attention.attn_combine_gate, [split[3], out, step, proj], args, (heads, 4), 64, args_index=3)
    expected = out.copy()
    attention.attn_decode_gate(q, k, v, expected, step, proj, args[1])
    np.testing.assert_allclose(f32(joined[1]), f32(expected), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("keys", [1, 300])
@pytest.mark.parametrize("function,packed", [("attn_decode_gate", False), ("attn_decode_packed_gate", True)])
@both_dims
def test_gate_in_the_epilogue(dims, function, packed, keys):
    buffers, args = case(dims, keys)
    grid = (dims[0] // (pack_of(dims) if packed else 1),)
    check(FAMILY, function, attention.attn_decode_gate, [*buffers, gates(dims)], args, grid, 128, atol=2**-8, args_index=5)


@pytest.mark.parametrize("threads", [32, 64, 512])
@pytest.mark.parametrize("dims", [(4, 2, 64), (3, 1, 96), (4, 4, 128), (10, 2, 160), (14, 2, 256), (6, 1, 32)])
def test_other_groups_and_dims(dims, threads):
    """Packs of 1, 2 and 3, a group of seven that cannot be packed, dims that leave lanes over."""
    buffers, args = case(dims, 333)
    out = [buffers[3].copy() for _ in range(2)]
    launch("attn_decode", [*buffers[:3], out[0], buffers[4]], args, (dims[0],), threads)
    launch("attn_decode_packed", [*buffers[:3], out[1], buffers[4]], args, (dims[0] // pack_of(dims),), threads)
    np.testing.assert_array_equal(out[1], out[0])
    expected = buffers[3].copy()
    attention.attn_decode(*buffers[:3], expected, buffers[4], args[1])
    np.testing.assert_allclose(f32(out[0]), f32(expected), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("keys", [1, 3, 70, 1000])
@pytest.mark.parametrize("dims", [TINY, REAL, (3, 1, 96)])
def test_strided_control_of_coalesced_loads(dims, keys):
    """D5's control reads the same rows in another order: equal within rounding, in all four paths."""
    (q, k, v, out, step), args = case(dims, keys, 4)
    pack = pack_of(dims)
    for function, groups in (("attn_decode", dims[0]), ("attn_decode_packed", dims[0] // pack)):
        check(FAMILY, function, attention.attn_decode, [q, k, v, out, step], args, (groups,), 64, atol=2**-8, constants=STRIDED)
    partial = poison((dims[0], 4, dims[2] + 2), np.float32)
    for function, groups in (("attn_decode_split", dims[0]), ("attn_decode_packed_split", dims[0] // pack)):
        check(FAMILY, function, attention.attn_decode_split, [q, k, v, partial, step], args, (groups, 4), 64, rtol=1e-4, atol=1e-5, constants=STRIDED)


@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize("keys", [1, 33, 64, 333, 1000])
@pytest.mark.parametrize("dims", [TINY, REAL, (3, 1, 96), (4, 2, 64), (6, 1, 32)])
def test_smaller_tiles_in_all_four_paths(dims, keys, tile):
    """Tuning.tile_keys: packed heads still give the same bytes."""
    (q, k, v, out, step), args = case(dims, keys, 4)
    pack, smaller = pack_of(dims), {4: ("uint", tile)}
    whole = [check(FAMILY, function, attention.attn_decode, [q, k, v, out, step], args, (groups,), 64, atol=2**-8, constants=smaller)[3]
             for function, groups in (("attn_decode", dims[0]), ("attn_decode_packed", dims[0] // pack))]
    np.testing.assert_array_equal(*whole)
    partial, reference = poison((dims[0], 4, dims[2] + 2), np.float32), bound(attention.attn_decode_split, block_keys=tile)
    split = [check(FAMILY, function, reference, [q, k, v, partial, step], args, (groups, 4), 64, rtol=1e-4, atol=1e-5, constants=smaller)[3]
             for function, groups in (("attn_decode_split", dims[0]), ("attn_decode_packed_split", dims[0] // pack))]
    np.testing.assert_array_equal(*(x.view(np.uint32) for x in split))


def test_combine_may_share_a_head_among_threadgroups():
    (q, k, v, out, step), args = case(REAL, 500, 8)
    partial = poison((16, 8, 258), np.float32)
    launch("attn_decode_split", [q, k, v, partial, step], args, (16, 8), 64)
    results = [out.copy() for _ in range(2)]
    for result, grid, threads in zip(results, ((16, 1), (16, 8)), (256, 32)):
        run(FAMILY, "attn_decode_combine", {0: partial, 1: result, 2: step}, args, 3, (*grid, 1), (threads, 1, 1))
    np.testing.assert_array_equal(*results)
