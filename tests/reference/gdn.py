"""metal/gdn.metal in numpy (float64): the same names, buffers in the same order, outputs written in place."""

from collections.abc import Mapping

import numpy as np

from tests.reference.norm import rms
from tests.reference.numbers import DONE, RING_SLOTS, RUNNING, SLOT, bf16, f64, sigmoid, silu


def slots(ring: np.ndarray, step: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The slot a pass reads, and the one it writes (None when generation has stopped)."""
    slot = int(step[SLOT])
    view = ring.reshape(RING_SLOTS, stride)
    return view[slot], view[(slot + 1) % RING_SLOTS] if step[DONE] == RUNNING else None


def gdn_conv_silu(
    proj: np.ndarray, w: np.ndarray, ring: np.ndarray, out: np.ndarray, step: np.ndarray, args: Mapping
) -> None:
    """proj bf16 [rows, ldp], w f32 [channels, taps], ring bf16 [3, ring_stride], out bf16 [rows, channels]."""
    rows, channels, taps = args["rows"], args["channels"], args["taps"]
    before, after = slots(ring, step, args["ring_stride"])
    kept = (taps - 1) * channels
    window = np.concatenate([before[:kept].reshape(taps - 1, channels), proj[:rows, :channels]])
    x = f64(window)
    out[:] = bf16(silu(sum(f64(w)[:, j] * x[j : j + rows] for j in range(taps))))
    if after is not None:
        after[:kept] = window[rows:].reshape(-1)


def gdn_qk_norm(c: np.ndarray, args: Mapping) -> None:
    """c bf16 [rows, ldc], q heads then k heads, normalised in place."""
    heads, dim = args["heads"], args["head_dim"]
    x = f64(c[:, : 2 * heads * dim]).reshape(-1, 2 * heads, dim)
    x = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    x[:, :heads] /= np.sqrt(dim)
    c[:, : 2 * heads * dim] = bf16(x.reshape(len(c), -1))


def gdn_gates(
    b: np.ndarray,
    a: np.ndarray,
    A_log: np.ndarray,
    dt_bias: np.ndarray,
    beta: np.ndarray,
    decay: np.ndarray,
    args: Mapping,
) -> None:
    """b, a bf16 [rows, ldb/lda]; A_log, dt_bias f32 [heads]; beta, decay f32 [rows, heads]."""
    heads = args["heads"]
    beta[:] = sigmoid(f64(b[:, :heads]))
    decay[:] = np.exp(-np.exp(f64(A_log)) * np.logaddexp(0, f64(a[:, :heads]) + f64(dt_bias)))


def gdn_scan(
    c: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    ring: np.ndarray,
    out: np.ndarray,
    step: np.ndarray,
    args: Mapping,
) -> None:
    """c bf16 [rows, ldc] = q | k | v, decay and beta f32 [rows, v_heads], ring f32 [3, ring_stride], slot [v_heads, dv, dk]."""
    rows, kh, vh, dk, dv = (args[n] for n in ("rows", "k_heads", "v_heads", "dk", "dv"))
    before, after = slots(ring, step, args["ring_stride"])
    x = f64(c)
    q, k = (np.repeat(x[:, i * kh * dk : (i + 1) * kh * dk].reshape(rows, kh, dk), vh // kh, 1) for i in (0, 1))
    v = x[:, 2 * kh * dk : 2 * kh * dk + vh * dv].reshape(rows, vh, dv)
    state = f64(before[: vh * dv * dk]).reshape(vh, dv, dk)
    for t in range(rows):
        state = state * f64(decay)[t][:, None, None]
        delta = f64(beta)[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
        state = state + delta[..., None] * k[t][:, None]
        out[t] = bf16(np.einsum("hvk,hk->hv", state, q[t]).reshape(-1))
    if after is not None:
        after[: vh * dv * dk] = state.reshape(-1)


gdn_scan_d64 = gdn_scan_d128 = gdn_scan


def gdn_gated_norm(o: np.ndarray, z: np.ndarray, w: np.ndarray, out: np.ndarray, args: Mapping) -> None:
    """o, out bf16 [rows, heads * dv], z bf16 [rows, ldz], w f32 [dv]."""
    rows, heads, dv = args["rows"], args["heads"], args["dv"]
    gate = silu(f64(z[:, : heads * dv])).reshape(rows, heads, dv)
    out[:] = bf16((rms(f64(o).reshape(rows, heads, dv), args["eps"]) * f64(w) * gate).reshape(rows, -1))
