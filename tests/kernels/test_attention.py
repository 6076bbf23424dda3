"""Attention kernels against numpy: tiny and 35B shapes, every head dim class, cache edges, nonzero start positions.

Caches are poisoned past the valid rows and end right there, so a key that must not be read shows as NaN or out of bounds.
"""

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import bf16, f32, poison, run
from tests.reference import attention
from tests.reference.numbers import STOPPED, step_state

TINY, REAL = (8, 1, 256), (16, 2, 256)   # query heads, KV heads, head dim
OTHERS = [(4, 2, 64), (3, 1, 96), (4, 4, 128), (2, 1, 160)]
LOW_ROWS = 64


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def prepare_case(rows, dims, position, seed=0, done=0, rotary=None):
    heads, kv_heads, dim = dims
    rng = np.random.default_rng(seed)
    rotary = dim // 4 if rotary is None else rotary
    k_offset, width = heads * 2 * dim, heads * 2 * dim + 2 * kv_heads * dim
    low, high = attention.rope_tables(position + rows, rotary, 1e7, LOW_ROWS)
    args = {
        "rows": rows, "q_heads": heads, "kv_heads": kv_heads, "head_dim": dim, "rotary_dim": rotary, "ldp": width + 8,
        "k_offset": k_offset, "v_offset": k_offset + kv_heads * dim, "rope_lo_rows": LOW_ROWS, "eps": 1e-6,
    }
    norms = [rng.normal(1, 0.2, dim).astype(np.float32) for _ in range(2)]
    caches = [poison((position + rows, kv_heads * dim), np.uint16) for _ in range(2)]
    for cache in caches:
        cache[:position] = bf16(rng.normal(0, 1, (position, kv_heads * dim)))
    proj = bf16(rng.normal(0, 1, (rows, width + 8)))
    return [proj, *norms, low, high, poison((rows, heads * dim), np.uint16), *caches, step_state(position=position, done=done)], args


@pytest.mark.parametrize("rows,position", [(1, 0), (1, 200), (5, 61), (33, 1)])
@pytest.mark.parametrize("dims", [TINY, REAL, *OTHERS])
def test_prepare(dims, rows, position):
    buffers, args = prepare_case(rows, dims, position)
    items = rows * (dims[0] + 2 * dims[1])
    check("attention_prepare", "attn_prepare", attention.attn_prepare, buffers, ("AttnPrepareArgs", args), (ceil_div(items, 16),), 64, atol=2**-9)


@pytest.mark.parametrize("dims,rows,rotary", [(TINY, 1, 64), (REAL, 3, 64), ((2, 1, 64), 5, 64), ((2, 1, 96), 2, 24), (TINY, 2, 40)])
def test_prepare_with_a_simdgroup_a_head(dims, rows, rotary):
    """Tuning.head_lanes = 32."""
    buffers, args = prepare_case(rows, dims, 9, rotary=rotary)
    groups = ceil_div(rows * (dims[0] + 2 * dims[1]), 2)
    check("attention_prepare", "attn_prepare", attention.attn_prepare, buffers, ("AttnPrepareArgs", args), (groups,), 64, atol=2**-9,
          constants={5: ("bool", True)})


def test_prepare_whole_head_rotates():
    buffers, args = prepare_case(3, (2, 1, 64), 5, rotary=64)
    check("attention_prepare", "attn_prepare", attention.attn_prepare, buffers, ("AttnPrepareArgs", args), (1,), 64, atol=2**-9)


def test_prepare_far_positions_keep_their_angle():
    """Row at position 262,143: against sines of the exact angle."""
    heads, kv_heads, dim, position, low_rows = 1, 1, 256, 262_143, 512
    rng = np.random.default_rng(1)
    low, high = attention.rope_tables(position + 1, 64, 1e7, low_rows)
    proj, ones = bf16(rng.normal(0, 1, (1, 4 * dim))), np.ones(dim, np.float32)
    out, cache = poison((1, dim), np.uint16), np.zeros((position + 1, dim), np.uint16)
    args = {
        "rows": 1, "q_heads": heads, "kv_heads": kv_heads, "head_dim": dim, "rotary_dim": 64, "ldp": 4 * dim, "k_offset": 2 * dim,
        "v_offset": 3 * dim, "rope_lo_rows": low_rows, "eps": 1e-6,
    }
    buffers = dict(enumerate([proj, ones, ones, low, high, out, cache, cache.copy(), step_state(position=position)]))
    run("attention_prepare", "attn_prepare", buffers, ("AttnPrepareArgs", args), 9, (1, 1, 1), (32, 1, 1))
    x = f32(proj)[0, :dim].astype(np.float64)
    angle = position * 1e7 ** (-2 * np.arange(32) / 64)
    expected = attention.rotate((x / np.sqrt((x * x).mean() + 1e-6))[None, None], angle[None])[0, 0]
    np.testing.assert_allclose(f32(out)[0], expected, atol=0.02)


def test_prepare_of_a_stopped_step_leaves_the_cache_alone():
    buffers, args = prepare_case(1, TINY, 9, done=STOPPED)
    got = check("attention_prepare", "attn_prepare", attention.attn_prepare, buffers, ("AttnPrepareArgs", args), (1,), 64, atol=2**-9)
    np.testing.assert_array_equal(got[6], buffers[6])
    np.testing.assert_array_equal(got[7], buffers[7])


def attention_case(rows, dims, position, seed=0, capacity=None, sharp=1.0, blocks=1):
    heads, kv_heads, dim = dims
    rng = np.random.default_rng(seed)
    caches = [poison((capacity or position + rows, kv_heads * dim), np.uint16) for _ in range(2)]
    for cache in caches:
        cache[: position + rows] = bf16(rng.normal(0, 1, (position + rows, kv_heads * dim)))
    q = bf16(rng.normal(0, sharp, (rows, heads * dim)))
    args = {"rows": rows, "q_heads": heads, "kv_heads": kv_heads, "head_dim": dim, "blocks": blocks, "scale": dim**-0.5}
    return [q, *caches, poison((rows, heads * dim), np.uint16), step_state(position=position)], ("AttnArgs", args)


@pytest.mark.parametrize("keys", [1, 2, 31, 33, 255, 256, 257, 1000])
@pytest.mark.parametrize("dims,threads", [(TINY, 128), (REAL, 256), ((4, 2, 64), 64), ((3, 1, 96), 32), ((4, 4, 128), 512)])
def test_decode(dims, threads, keys):
    buffers, args = attention_case(1, dims, keys - 1, capacity=keys + 5)
    check("attention_decode", "attn_decode", attention.attn_decode, buffers, args, (dims[0],), threads, atol=2**-8)


@pytest.mark.parametrize("keys,blocks", [(1, 4), (255, 4), (256, 8), (257, 8), (1000, 16), (1000, 7)])
@pytest.mark.parametrize("dims", [TINY, REAL, (3, 1, 96)])
def test_decode_in_blocks(dims, keys, blocks):
    """D7: the same answer as the general path, with empty blocks joining harmlessly."""
    (q, k, v, out, step), args = attention_case(1, dims, keys - 1, blocks=blocks)
    partial = poison((dims[0], blocks, dims[2] + 2), np.float32)
    split = check("attention_decode", "attn_decode_split", attention.attn_decode_split, [q, k, v, partial, step], args, (dims[0], blocks), 64, rtol=1e-4, atol=1e-5)
    joined = check("attention_decode", "attn_decode_combine", attention.attn_decode_combine, [split[3], out.reshape(-1), step], args, (dims[0],), 128)
    expected = out.copy()
    attention.attn_decode(q, k, v, expected, step, args[1])
    np.testing.assert_allclose(f32(joined[1]), f32(expected)[0], rtol=2**-7, atol=2**-8)


def prefill(buffers, args, threads=128, constants=None):
    grid = (args[1]["q_heads"], ceil_div(args[1]["rows"], threads // 4))
    return check("attention_prefill", "attn_prefill", attention.attn_prefill, buffers, args, grid, threads, atol=2**-8, constants=constants)


@pytest.mark.parametrize("rows,position", [(1, 0), (3, 0), (7, 0), (8, 0), (9, 0), (31, 0), (33, 0), (64, 0), (65, 3), (5, 100), (1, 31), (40, 29)])
@pytest.mark.parametrize("dims", [TINY, (4, 2, 64), (3, 1, 96)])
def test_prefill(dims, rows, position):
    prefill(*attention_case(rows, dims, position))


@pytest.mark.parametrize("rows,position", [(33, 0), (17, 250)])
@pytest.mark.parametrize("dims", [REAL, (4, 4, 128), (2, 1, 160)])
def test_prefill_more_dims(dims, rows, position):
    prefill(*attention_case(rows, dims, position, capacity=position + rows + 40))


@pytest.mark.parametrize("threads", [32, 64])
def test_prefill_any_threadgroup(threads):
    prefill(*attention_case(37, TINY, 11), threads=threads)


def test_prefill_with_head_dim_constant():
    prefill(*attention_case(20, TINY, 4), constants={0: ("uint", 256)})


def test_prefill_with_moving_peaks():
    """Scores that keep rising make every step rescale its output."""
    (q, k, v, out, step), args = attention_case(40, TINY, 120, sharp=6.0)
    k[:] = bf16(f32(k) * np.linspace(0.2, 4, len(k))[:, None].astype(np.float32))
    prefill([q, k, v, out, step], args)


def test_prefill_ignores_padding():
    """Rows of q past `rows` (a padded tile) are neither read nor written."""
    (q, k, v, out, step), args = attention_case(32, TINY, 16)
    args = ("AttnArgs", {**args[1], "rows": 21})
    q[21:], k[37:], v[37:] = 0x7FC0, 0x7FC0, 0x7FC0
    got = prefill([q, k, v, out, step], args)[3]
    assert (got[21:] == 0xFFFF).all()


def test_prefill_agrees_with_decode():
    """A chunk's rows equal single steps within rounding: prefill then decode is one computation."""
    (q, k, v, out, step), args = attention_case(4, TINY, 300)
    rows = prefill([q, k, v, out, step], args)[3]
    for r in range(4):
        one = ("AttnArgs", {**args[1], "rows": 1})
        got = check("attention_decode", "attn_decode", attention.attn_decode, [q[r : r + 1].copy(), k, v, poison((1, 2048), np.uint16), step_state(position=300 + r)], one, (8,), 128, atol=2**-8)
        np.testing.assert_allclose(f32(got[3])[0], f32(rows)[r], rtol=2**-7, atol=2**-10)
