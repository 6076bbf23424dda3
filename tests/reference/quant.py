"""Affine quantisation and embedding in numpy (metal/quant.h, metal/embed.metal). bf16 arrays are np.uint16."""

from __future__ import annotations

import numpy as np


def to_f32(u16: np.ndarray) -> np.ndarray:
    """bf16 bits to float32, exactly."""
    return (np.asarray(u16).astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float to bf16 bits, to nearest even, through float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def unpack(w: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [..., k * bits / 32] to integers [..., k]: value j sits in word j // (32 / bits), lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((w[..., None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(*w.shape[:-1], -1)


def dequantise(w: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group: int) -> np.ndarray:
    """float64 weights scale * q + bias of every group of `group` along the last axis."""
    q = unpack(w, bits).astype(np.float64)
    return q * np.repeat(to_f32(scales), group, -1) + np.repeat(to_f32(biases), group, -1)


def expand(w: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group: int) -> np.ndarray:
    """The weights as a matrix tile holds them (P1): rounded to bf16, returned as float32."""
    return to_f32(to_bf16(dequantise(w, scales, biases, bits, group)))


def random_matrix(rng: np.random.Generator, shape: tuple[int, ...], bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random packed weights, scales of either sign and biases for a matrix of `shape` [..., n, k]."""
    *outer, k = shape
    w = rng.integers(0, 1 << 32, (*outer, k * bits // 32), dtype=np.uint32)
    scales = rng.normal(0, 0.3 / (1 << bits), (*outer, k // group))
    biases = rng.normal(0, 0.05, (*outer, k // group))
    return w, to_bf16(scales), to_bf16(biases)


def embed(w: np.ndarray, scales: np.ndarray, biases: np.ndarray, ids: np.ndarray, bits: int, group: int) -> np.ndarray:
    """bf16 [rows, hidden]: the table's rows `ids`."""
    ids = np.minimum(ids, len(w) - 1)
    return to_bf16(dequantise(w[ids], scales[ids], biases[ids], bits, group))


def embed_step(w: np.ndarray, scales: np.ndarray, biases: np.ndarray, tokens: tuple[int, int], step: int, bits: int, group: int) -> np.ndarray:
    """D2: the row of token slot step & 1, bf16 [1, hidden]."""
    return embed(w, scales, biases, np.array([tokens[step & 1]]), bits, group)
