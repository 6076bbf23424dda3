"""metal/attention_*.metal in numpy (float64): the same names, buffers in the same order, outputs written in place."""

from collections.abc import Iterator, Mapping

import numpy as np

from tests.reference.norm import rms
from tests.reference.numbers import DONE, POSITION, RUNNING, bf16, f64, sigmoid

BLOCK_KEYS = 64  # tile_keys() in metal/attend.h, unless the host asks for half
MASKED = -0.5 * float(np.finfo(np.float32).max)  # kMasked in metal/lanes.h


def rope_tables(positions: int, rotary_dim: int, theta: float, low_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) of (p % low_rows) inv_freq and of (p // low_rows) low_rows inv_freq: f32 [·, rotary_dim / 2, 2]."""
    inv_freq = theta ** (-2 * np.arange(rotary_dim // 2) / rotary_dim)
    low = np.arange(low_rows)[:, None] * inv_freq
    high = np.arange(-(-positions // low_rows))[:, None] * (low_rows * inv_freq)
    return tuple(np.stack([np.cos(a), np.sin(a)], -1).astype(np.float32) for a in (low, high))


def rotate(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """RoPE with half-split pairs; x [rows, heads, dim], angle [rows, rotary / 2]."""
    half = angle.shape[1]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], -1)


def attn_prepare(
    proj: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    rope_lo: np.ndarray,
    rope_hi: np.ndarray,
    q_out: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    step: np.ndarray,
    args: Mapping,
) -> None:
    """proj bf16 [rows, ldp]; writes q_out [rows, q_heads * dim] and rows position.. of the caches."""
    rows, heads, kv_heads, dim = (args[n] for n in ("rows", "q_heads", "kv_heads", "head_dim"))
    x, start = f64(proj), int(step[POSITION])
    q = x[:, : heads * 2 * dim].reshape(rows, heads, 2 * dim)[..., :dim]
    k = x[:, args["k_offset"] :][:, : kv_heads * dim].reshape(rows, kv_heads, dim)
    v = proj[:, args["v_offset"] :][:, : kv_heads * dim]
    position = start + np.arange(rows)
    low, high = position % args["rope_lo_rows"], position // args["rope_lo_rows"]
    angle = np.arctan2(f64(rope_lo)[low, :, 1], f64(rope_lo)[low, :, 0]) + np.arctan2(f64(rope_hi)[high, :, 1], f64(rope_hi)[high, :, 0])
    q_out[:] = bf16(rotate(rms(q, args["eps"]) * f64(q_norm), angle).reshape(rows, -1))
    if step[DONE] == RUNNING:
        k_cache[start : start + rows] = bf16(rotate(rms(k, args["eps"]) * f64(k_norm), angle).reshape(rows, -1))
        v_cache[start : start + rows] = v


def attn_split(proj: np.ndarray, q: np.ndarray, k: np.ndarray, args: Mapping) -> None:
    """Queries without gates and keys, copied out of proj bf16 [rows, ldp]."""
    rows, heads, kv_heads, dim = (args[n] for n in ("rows", "q_heads", "kv_heads", "head_dim"))
    q[:] = proj[:, : heads * 2 * dim].reshape(rows, heads, 2 * dim)[..., :dim].reshape(rows, -1)
    k[:] = proj[:, args["k_offset"] :][:, : kv_heads * dim]


def attn_qk_norm(q: np.ndarray, k: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray, args: Mapping) -> None:
    """RMSNorm of each head in place."""
    for x, norm in ((q, q_norm), (k, k_norm)):
        x[:] = bf16(rms(f64(x).reshape(args["rows"], -1, args["head_dim"]), args["eps"]) * f64(norm)).reshape(x.shape)


def attn_rope(q: np.ndarray, k: np.ndarray, rope_lo: np.ndarray, rope_hi: np.ndarray, step: np.ndarray, args: Mapping) -> None:
    """RoPE in place."""
    position = int(step[POSITION]) + np.arange(args["rows"])
    low, high = f64(rope_lo)[position % args["rope_lo_rows"]], f64(rope_hi)[position // args["rope_lo_rows"]]
    angle = np.arctan2(low[..., 1], low[..., 0]) + np.arctan2(high[..., 1], high[..., 0])
    for x in (q, k):
        x[:] = bf16(rotate(f64(x).reshape(args["rows"], -1, args["head_dim"]), angle)).reshape(x.shape)


def attn_cache_write(k: np.ndarray, proj: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, step: np.ndarray, args: Mapping) -> None:
    """Keys and values into rows position.. of the caches."""
    if step[DONE] == RUNNING:
        rows = slice(int(step[POSITION]), int(step[POSITION]) + args["rows"])
        k_cache[rows], v_cache[rows] = k, proj[:, args["v_offset"] :][:, : k.shape[1]]


def scores_and_values(q, k_cache, v_cache, args, keys):
    """Scores [heads, rows, keys] scaled, values repeated per query head [heads, keys, dim]."""
    heads, kv_heads, dim = args["q_heads"], args["kv_heads"], args["head_dim"]
    q = f64(q).reshape(-1, heads, dim)
    k, v = (np.repeat(f64(c[:keys]).reshape(keys, kv_heads, dim), heads // kv_heads, 1) for c in (k_cache, v_cache))
    return np.einsum("rhd,khd->hrk", q, k) * args["scale"], v.transpose(1, 0, 2)


def attn_prefill(
    q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, out: np.ndarray, step: np.ndarray, args: Mapping
) -> None:
    """q, out bf16 [rows, q_heads * dim]; row r sees keys 0 .. position + r."""
    rows, start = args["rows"], int(step[POSITION])
    s, v = scores_and_values(q[:rows], k_cache, v_cache, args, start + rows)
    s[:, np.arange(start + rows)[None] > start + np.arange(rows)[:, None]] = -np.inf
    p = np.exp(s - s.max(-1, keepdims=True))
    out[:rows] = bf16((p / p.sum(-1, keepdims=True) @ v).transpose(1, 0, 2).reshape(rows, -1))


def decode_heads(q, k_cache, v_cache, args: Mapping, keys: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Per query head: scaled scores [keys] and the values [keys, dim] of its KV head; one head at a time, to hold long caches."""
    heads, kv_heads, dim = args["q_heads"], args["kv_heads"], args["head_dim"]
    group = heads // kv_heads
    for head, query in enumerate(f64(q).reshape(heads, dim)):
        if head % group == 0:
            k, v = (f64(c[:keys].reshape(keys, kv_heads, dim)[:, head // group]) for c in (k_cache, v_cache))
        yield k @ query * args["scale"], v


def output_gate(proj: np.ndarray, args: Mapping) -> np.ndarray:
    """sigmoid of the gates behind each head's query: [q_heads, dim]."""
    heads, dim = args["q_heads"], args["head_dim"]
    return sigmoid(f64(proj.reshape(-1)[: heads * 2 * dim]).reshape(heads, 2, dim)[:, 1])


def attn_decode(q, k_cache, v_cache, out, step: np.ndarray, args: Mapping) -> None:
    """One row: q, out bf16 [q_heads * dim]."""
    attn_decode_gate(q, k_cache, v_cache, out, step, None, args)


def attn_decode_gate(q, k_cache, v_cache, out, step: np.ndarray, proj: np.ndarray | None, args: Mapping) -> None:
    """The same times the output gate; proj bf16, per head a query, then its gate."""
    result = np.empty((args["q_heads"], args["head_dim"]))
    for head, (s, v) in enumerate(decode_heads(q, k_cache, v_cache, args, int(step[POSITION]) + 1)):
        p = np.exp(s - s.max())
        result[head] = p @ v / p.sum()
    if proj is not None:
        result *= output_gate(proj, args)
    out.reshape(-1)[:] = bf16(result.reshape(-1))


def attn_decode_split(q, k_cache, v_cache, blocks_out: np.ndarray, step: np.ndarray, args: Mapping, block_keys: int = BLOCK_KEYS) -> None:
    """blocks_out f32 [q_heads, blocks, dim + 2]: sum of exp(s - peak) v, peak, sum of exp(s - peak); peak MASKED when empty."""
    keys, blocks, dim = int(step[POSITION]) + 1, args["blocks"], args["head_dim"]
    size = -(-(-(-keys // block_keys)) // blocks) * block_keys
    blocks_out[..., :dim], blocks_out[..., dim], blocks_out[..., dim + 1] = 0, MASKED, 0
    for head, (scores, values) in enumerate(decode_heads(q, k_cache, v_cache, args, keys)):
        for b in range(-(-keys // size)):
            s, v = (x[b * size : (b + 1) * size] for x in (scores, values))
            p = np.exp(s - s.max())
            blocks_out[head, b, :dim], blocks_out[head, b, dim], blocks_out[head, b, dim + 1] = p @ v, s.max(), p.sum()


def attn_decode_combine(blocks_in: np.ndarray, out: np.ndarray, step: np.ndarray, args: Mapping) -> None:
    """Joins the blocks of attn_decode_split."""
    attn_combine_gate(blocks_in, out, step, None, args)


def attn_combine_gate(blocks_in: np.ndarray, out: np.ndarray, step: np.ndarray, proj: np.ndarray | None, args: Mapping) -> None:
    """The same times the output gate."""
    dim = args["head_dim"]
    x = f64(blocks_in)
    factor = np.exp(x[..., dim] - x[..., dim].max(-1, keepdims=True))
    joined = (factor[..., None] * x[..., :dim]).sum(1) / (factor * x[..., dim + 1]).sum(1)[:, None]
    if proj is not None:
        joined *= output_gate(proj, args)
    out.reshape(-1)[:] = bf16(joined.reshape(-1))


# D6: packing changes who loads a KV row, not what is computed.
attn_decode_packed, attn_decode_packed_gate, attn_decode_packed_split = attn_decode, attn_decode_gate, attn_decode_split
