"""metal/fused_projection.metal, moe_decode.metal and gdn_step.metal in numpy (float64): the same names, buffers in the same
order, outputs written in place.

Every function that stands for several kernels takes `between`: what happens to a value where the separate kernels would store
it. `exact` is what the fused kernels do (f32 throughout); `through_bf16` is the composition of the separate kernels.
The matrix of a projection comes as `dense(w, scales, biases)`, float64 [..., n, k].
"""

from collections.abc import Callable, Mapping

import numpy as np

from tests.reference import gdn, moe, quant
from tests.reference.norm import rms
from tests.reference.numbers import bf16, f64, sigmoid, silu

Between = Callable[[np.ndarray], np.ndarray]
Dense = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def exact(x: np.ndarray) -> np.ndarray:
    return x


def through_bf16(x: np.ndarray) -> np.ndarray:
    return f64(bf16(x))


def quantised(bits: int, group: int) -> Dense:
    return lambda w, scales, biases: quant.dequantise(w, scales, biases, bits, group)


def unquantised(w: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    return f64(w)


def store(y: np.ndarray, value: np.ndarray) -> None:
    y[:] = bf16(value) if y.dtype == np.uint16 else value


def gemv_norm(
    w: np.ndarray, scales: np.ndarray, biases: np.ndarray, h: np.ndarray, y: np.ndarray, weight: np.ndarray, args: Mapping,
    dense: Dense, between: Between = exact,
) -> None:
    """h bf16 [k], weight f32 [k], y [n] = W RMSNorm(h)."""
    store(y, dense(w, scales, biases) @ between(rms(f64(h), args["eps"]) * f64(weight)))


def gemv_gated_norm_add(
    w: np.ndarray, scales: np.ndarray, biases: np.ndarray, o: np.ndarray, h: np.ndarray, z: np.ndarray, weight: np.ndarray,
    args: Mapping, dense: Dense, between: Between = exact,
) -> None:
    """o, z bf16 [heads * dv], weight f32 [dv], h bf16 [n] += W (RMSNorm(o) per head * silu(z))."""
    x = rms(f64(o).reshape(-1, args["dv"]), args["eps"]) * f64(weight) * silu(f64(z)).reshape(-1, args["dv"])
    h[:] = bf16(f64(h) + between(dense(w, scales, biases) @ between(x.reshape(-1))))


def gemv_gate_add(
    w: np.ndarray, scales: np.ndarray, biases: np.ndarray, o: np.ndarray, h: np.ndarray, proj: np.ndarray, args: Mapping,
    dense: Dense, between: Between = exact,
) -> None:
    """o bf16 [heads * dim], proj bf16 with [query | gate] per head, h bf16 [n] += W (o * sigmoid(gate))."""
    gate = f64(proj[: 2 * len(o)]).reshape(-1, 2, args["head_dim"])[:, 1].reshape(-1)
    h[:] = bf16(f64(h) + between(dense(w, scales, biases) @ between(f64(o) * sigmoid(gate))))


def moe_gate_up(
    w: np.ndarray, scales: np.ndarray, biases: np.ndarray, h: np.ndarray, act: np.ndarray, weight: np.ndarray, logits: np.ndarray,
    expert_ids: np.ndarray, expert_weights: np.ndarray, args: Mapping, dense: Dense, between: Between = exact,
) -> None:
    """w [matrices, 2 width, k]; act bf16 [slots, width]; logits f32 [experts + 1]; ids uint32 and weights f32 [slots]."""
    width, shared = args["width"], args["slots"] - args["top_k"]
    if args["topk"]:
        gate = np.repeat(logits[None, args["experts"] :][:, :1], shared, 1)
        ids, weights = moe.router_topk(logits[None], gate, args["experts"], args["top_k"], shared, bool(args["normalise"]))
        expert_ids[:], expert_weights[:] = ids[0], weights[0]
    x = between(rms(f64(h), args["eps"]) * f64(weight)) if args["normed"] else f64(h)
    for slot, expert in enumerate(expert_ids):
        if expert < args["matrices"]:
            y = between(dense(w[expert], scales[expert], biases[expert]) @ x)
            act[slot] = bf16(silu(y[:width]) * y[width:])


def moe_down_add(
    w: np.ndarray, scales: np.ndarray, biases: np.ndarray, act: np.ndarray, h: np.ndarray, expert_ids: np.ndarray,
    expert_weights: np.ndarray, args: Mapping, dense: Dense, between: Between = exact,
) -> None:
    """w [matrices, n, k]; act bf16 [slots, k]; h bf16 [n] += the weighted sum over slots."""
    total = f64(h)
    for slot, expert in enumerate(expert_ids):
        if expert < args["matrices"]:
            total = total + f64(expert_weights)[slot] * between(dense(w[expert], scales[expert], biases[expert]) @ f64(act[slot]))
    h[:] = bf16(total)


def gdn_step(
    proj: np.ndarray, w: np.ndarray, conv_ring: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray, state_ring: np.ndarray,
    out: np.ndarray, step: np.ndarray, gates: np.ndarray, args: Mapping, between: Between = exact,
) -> None:
    """proj bf16 (q | k | v first), conv_ring bf16 [3, conv_stride], state_ring f32 [3, state_stride], out bf16 [v_heads * dv]."""
    kh, vh, dk, dv, taps = (args[n] for n in ("k_heads", "v_heads", "dk", "dv", "taps"))
    channels = 2 * kh * dk + vh * dv
    window_before, window_after = gdn.slots(conv_ring, step, args["conv_stride"])
    window = np.concatenate([window_before[: (taps - 1) * channels].reshape(taps - 1, channels), proj[None, :channels]])
    c = between(silu((f64(w).T * f64(window)).sum(0)))
    q, k = (c[i * kh * dk : (i + 1) * kh * dk].reshape(kh, dk) for i in (0, 1))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(between(x), vh // kh, 0) for x in (q / np.sqrt(dk), k))
    v = c[2 * kh * dk :].reshape(vh, dv)
    beta = sigmoid(f64(gates[args["b_offset"] :][:vh]))
    decay = np.exp(-np.exp(f64(A_log)) * np.logaddexp(0, f64(gates[args["a_offset"] :][:vh]) + f64(dt_bias)))
    before, after = gdn.slots(state_ring, step, args["state_stride"])
    state = f64(before[: vh * dv * dk]).reshape(vh, dv, dk) * decay[:, None, None]
    delta = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
    state = state + delta[..., None] * k[:, None]
    out[:] = bf16(np.einsum("hvk,hk->hv", state, q).reshape(-1))
    if window_after is not None and after is not None:
        window_after[: (taps - 1) * channels] = window[1:].reshape(-1)
        after[: vh * dv * dk] = state.reshape(-1)


gdn_step_d64 = gdn_step_d128 = gdn_step


def gdn_scan_norm(
    c: np.ndarray, decay: np.ndarray, beta: np.ndarray, ring: np.ndarray, out: np.ndarray, step: np.ndarray, z: np.ndarray,
    weight: np.ndarray, args: Mapping, between: Between = exact,
) -> None:
    """gdn_scan of one row, then the gated norm: c bf16 (q | k | v), z and out bf16 [v_heads * dv], weight f32 [dv]."""
    kh, vh, dk, dv = (args[n] for n in ("k_heads", "v_heads", "dk", "dv"))
    before, after = gdn.slots(ring, step, args["ring_stride"])
    x = f64(c)
    q, k = (np.repeat(x[i * kh * dk : (i + 1) * kh * dk].reshape(kh, dk), vh // kh, 0) for i in (0, 1))
    v = x[2 * kh * dk :][: vh * dv].reshape(vh, dv)
    state = f64(before[: vh * dv * dk]).reshape(vh, dv, dk) * f64(decay)[:, None, None]
    delta = f64(beta)[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
    state = state + delta[..., None] * k[:, None]
    o = between(np.einsum("hvk,hk->hv", state, q))
    out[:] = bf16((rms(o, args["eps"]) * f64(weight) * silu(f64(z)).reshape(vh, dv)).reshape(-1))
    if after is not None:
        after[: vh * dv * dk] = state.reshape(-1)


gdn_scan_norm_d64 = gdn_scan_norm_d128 = gdn_scan_norm
