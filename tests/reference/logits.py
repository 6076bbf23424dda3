"""metal/logits.metal in numpy: the same names, buffers in the same order, outputs written in place."""

from collections.abc import Mapping

import numpy as np

from tests.reference.numbers import DONE, HISTORY_LENGTH, RUNNING, STEP, TOKENS
from tests.reference.sampling import SAMPLE_PARAMS

PENALTIES, BIAS, MASK = 1, 2, 4
TOP = 20
MASKED = np.float32(-0.5) * np.finfo(np.float32).max
STEP_LOGPROBS = np.dtype([("token", "u4"), ("value", "f4"), ("count", "u4"), ("ids", "u4", TOP), ("values", "f4", TOP)])


def adjust_logits(
    logits: np.ndarray, counts: np.ndarray, bias: np.ndarray, mask: np.ndarray, params: np.ndarray, step: np.ndarray, args: Mapping,
) -> None:
    """logits f32 [vocab] in place; counts uint32 [vocab] of the tokens generated before this step's, which is added."""
    if step[DONE] != RUNNING:
        return
    p = params.reshape(-1).view(SAMPLE_PARAMS)[0]
    if p["adjust"] & PENALTIES:
        if step[STEP] > 0:
            counts[step[TOKENS + step[STEP] % 2]] += 1
        seen = counts > 0
        scaled = np.where(logits > 0, logits / p["repetition_penalty"], logits * p["repetition_penalty"])
        lowered = scaled - (p["presence_penalty"] + counts.astype(np.float32) * p["frequency_penalty"])
        logits[seen] = lowered[seen]
    if p["adjust"] & BIAS:
        logits += bias
    if p["adjust"] & MASK:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
        logits[~allowed & np.isfinite(logits)] = MASKED


def token_logprobs(logits: np.ndarray, params: np.ndarray, step: np.ndarray, sampled: np.ndarray, out: np.ndarray, args: Mapping) -> None:
    """out = STEP_LOGPROBS [16] as uint32 words; only the entry of this step is written, and of that what `count` covers."""
    if step[DONE] != RUNNING or sampled[1]:
        return
    p = params.reshape(-1).view(SAMPLE_PARAMS)[0]
    x = logits.astype(np.float64) / (p["temperature"] or 1.0)
    logprobs = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[logits[order] > MASKED][: p["top_logprobs"]]
    entry = out.view(STEP_LOGPROBS)[step[STEP] % HISTORY_LENGTH]
    entry["token"], entry["value"], entry["count"] = sampled[0], logprobs[sampled[0]], len(order)
    entry["ids"][: len(order)], entry["values"][: len(order)] = order, logprobs[order]
