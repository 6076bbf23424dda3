"""metal/norm.metal in numpy: the same names, buffers in the same order, outputs written in place."""

from collections.abc import Mapping

import numpy as np

from tests.reference.numbers import bf16, f64


def rms(x: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x²) + eps) over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rmsnorm(x: np.ndarray, w: np.ndarray, out: np.ndarray, args: Mapping) -> None:
    """x, out bf16 [rows, n]; w f32 [n]."""
    out[:] = bf16(rms(f64(x), args["eps"]) * f64(w))


def add_rmsnorm(h: np.ndarray, y: np.ndarray, w: np.ndarray, out: np.ndarray, args: Mapping) -> None:
    """h += y (rounded to bf16), out = norm of that."""
    h[:] = bf16(f64(h) + f64(y))
    rmsnorm(h, w, out, args)
