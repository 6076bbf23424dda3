"""metal/sampling.metal in numpy: the same names, buffers in the same order, outputs written in place.

Weights are the kernel's integers, so apart from an exp that rounds differently the sampler's choice is equal, not just alike.
"""

from collections.abc import Mapping

import numpy as np

from tests.reference.numbers import (
    DONE, FLAGS, HISTORY, HISTORY_LENGTH, NONFINITE, POSITION, RING_SLOTS, RUNNING, SLOT, STEP, STOPPED, TOKENS,
)

WEIGHT_ONE = 1 << 26
SAMPLE_PARAMS = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "u4"), ("seed_lo", "u4"), ("seed_hi", "u4"),
     ("repetition_penalty", "f4"), ("presence_penalty", "f4"), ("frequency_penalty", "f4"), ("adjust", "u4"), ("top_logprobs", "u4")]
)


def sample_params(temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=0, repetition=1.0, presence=0.0, frequency=0.0, adjust=0,
                  top_logprobs=0) -> np.ndarray:
    """SampleParams of metal/common.h as the bytes of a uint32 array."""
    fields = (temperature, top_p, min_p, top_k, seed & 0xFFFFFFFF, seed >> 32, repetition, presence, frequency, adjust, top_logprobs)
    return np.array([fields], SAMPLE_PARAMS).view(np.uint32)


def argmax_partial(logits: np.ndarray, partial: np.ndarray, flags: np.ndarray, args: Mapping) -> None:
    """logits f32 [vocab] → partial uint32 [blocks, 2] (value bits, id), flags uint32 [blocks]."""
    vocab, blocks = args["vocab"], args["blocks"]
    size = -(-(-(-vocab // blocks)) // 8) * 8
    for b in range(blocks):
        part = logits[min(b * size, vocab) : min((b + 1) * size, vocab)]
        finite = np.where(np.isnan(part), -np.inf, part)
        best = finite.argmax() if len(part) and finite.max() > -np.inf else None
        value = np.float32(-np.inf if best is None else part[best])
        partial[b] = value.view(np.uint32), 0xFFFFFFFF if best is None else b * size + best
        flags[b] = not np.isfinite(part).all()


def finish(
    partial: np.ndarray, flags: np.ndarray, step: np.ndarray, stop_ids: np.ndarray, sampled: np.ndarray, args: Mapping
) -> None:
    """Advances StepState (uint32 words) by one sampled token."""
    if step[DONE] != RUNNING:
        return
    if args["sample"]:
        token, broken = int(sampled[0]), bool(sampled[1])
    else:
        used = partial[: args["blocks"]]
        values = used[:, 0].copy().view(np.float32)
        token, broken = int(used[values == values.max(), 1].min()), bool(flags[: args["blocks"]].any())
    index, done = int(step[STEP]), RUNNING
    if broken:
        done = NONFINITE
    else:
        done = STOPPED if token in stop_ids[: args["stop_count"]] else RUNNING
        step[TOKENS + (index + 1) % 2] = token
        advance_state(step, args["rows"])
    step[HISTORY + index % HISTORY_LENGTH] = token
    step[FLAGS + index % HISTORY_LENGTH] = done
    step[DONE], step[STEP] = done, index + 1


def advance_state(step: np.ndarray, rows: int) -> None:
    step[POSITION] += rows
    step[SLOT] = (step[SLOT] + 1) % RING_SLOTS


def advance(step: np.ndarray, args: Mapping) -> None:
    """position += rows and the next ring slot, unless generation has stopped."""
    if step[DONE] == RUNNING:
        advance_state(step, args["rows"])


def philox(key: tuple[int, int], counter: int) -> tuple[int, int]:
    """First two words of Philox4x32-10 with counter (counter, 0, 0, 0)."""
    x, (k0, k1), mask = [counter, 0, 0, 0], key, 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k0, b & mask, (a >> 32) ^ x[3] ^ k1, a & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return x[0], x[1]


def weights(logits: np.ndarray, params: np.ndarray) -> np.ndarray:
    """Integer weight of each token after temperature, top-k, top-p and min-p (all ties at a threshold stay)."""
    p = params.reshape(-1).view(SAMPLE_PARAMS)[0]
    peak = logits.max()
    if p["temperature"] == 0:
        return np.where(logits == peak, WEIGHT_ONE, 0).astype(np.int64)
    w = np.rint(np.exp(((logits - peak) / p["temperature"]).astype(np.float32)) * np.float32(WEIGHT_ONE)).astype(np.int64)
    kept = np.ones(len(logits), bool)
    if 0 < p["top_k"] < len(logits):
        kept &= logits >= np.sort(logits)[-int(p["top_k"])]
    if p["top_p"] < 1:
        values, inverse = np.unique(np.where(kept, logits, -np.inf), return_inverse=True)
        mass = np.bincount(inverse, np.where(kept, w, 0), len(values)).astype(np.int64)
        above = mass.sum() - np.cumsum(mass)
        fraction = int(max(float(p["top_p"]), 0.0) * 2**32)
        kept &= (above * 2**32 < fraction * int(mass.sum()))[inverse] | (logits == peak)
    return np.where(kept & (w >= int(np.ceil(np.float32(min(max(p["min_p"], 0), 1)) * np.float32(WEIGHT_ONE)))), w, 0)


def sample_token(logits: np.ndarray, params: np.ndarray, step: np.ndarray, out: np.ndarray, args: Mapping) -> None:
    """logits f32 [vocab], params = sample_params(...); out uint32 [2]: token, 1 when a logit is not finite."""
    if not np.isfinite(logits).all():
        out[:] = 0, 1
        return
    p = params.reshape(-1).view(SAMPLE_PARAMS)[0]
    cumulative = np.cumsum(weights(logits, params))
    high, low = philox((int(p["seed_lo"]), int(p["seed_hi"])), int(step[STEP]))
    draw = 0 if p["temperature"] == 0 else int(cumulative[-1]) * (high << 32 | low) >> 64
    out[:] = np.searchsorted(cumulative, draw, side="right"), 0
