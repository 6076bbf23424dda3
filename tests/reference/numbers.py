"""bfloat16 bits (uint16) to and from float, and the layout of StepState (metal/common.h) as a uint32 array."""

import numpy as np

RING_SLOTS, HISTORY_LENGTH = 3, 16
RUNNING, STOPPED, NONFINITE = 0, 1, 2
POSITION, SLOT, STEP, DONE, TOKENS, HISTORY, FLAGS = 0, 1, 2, 3, 4, 6, 6 + HISTORY_LENGTH
STEP_STATE_WORDS = FLAGS + HISTORY_LENGTH


def bf16(x: np.ndarray) -> np.ndarray:
    """Any float → bfloat16 bits, rounded to nearest even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def f64(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits or float32 → float64."""
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def step_state(position: int = 0, slot: int = 0, step: int = 0, done: int = RUNNING) -> np.ndarray:
    """A StepState with these fields and zeros elsewhere."""
    state = np.zeros(STEP_STATE_WORDS, np.uint32)
    state[[POSITION, SLOT, STEP, DONE]] = position, slot, step, done
    return state


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)
