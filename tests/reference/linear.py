"""Projections in numpy (metal/gemv.metal, gemm.metal, grouped_gemm.metal, activation.metal's output_gate).

Matrices come as float arrays [n, k]: quant.dequantise for a GEMV, which never rounds a weight, quant.expand for a GEMM,
whose tiles hold bf16. Results are float64; a kernel with bf16 output rounds them once.
"""

from __future__ import annotations

import numpy as np

from tests.reference.quant import to_f32


def gemv(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """y [rows, n] = x [rows, k] (bf16) weights^T."""
    return to_f32(x).astype(np.float64) @ np.asarray(weights, np.float64).T


gemm = gemv   # the same product; what differs is the rounding of `weights`


def moe_gemv(weights: np.ndarray, x: np.ndarray, expert_ids: np.ndarray, per_slot: bool) -> np.ndarray:
    """y [rows * slots, n]; weights [experts, n, k], expert_ids [rows, slots]; x has a row per pair or per row."""
    slots = expert_ids.shape[1]
    rows = to_f32(x).astype(np.float64)
    return np.stack([np.asarray(weights[e], np.float64) @ rows[i if per_slot else i // slots] for i, e in enumerate(expert_ids.reshape(-1))])


def grouped_gemm(weights: np.ndarray, x: np.ndarray, offsets: np.ndarray, sorted_rows: np.ndarray, gather_slots: int) -> np.ndarray:
    """y [total, n] in sorted order: expert e owns sorted rows offsets[e] .. offsets[e + 1]."""
    source = sorted_rows // gather_slots if gather_slots else np.arange(len(sorted_rows))
    rows = to_f32(x).astype(np.float64)[source]
    y = np.zeros((len(sorted_rows), weights.shape[1]))
    for e in range(len(offsets) - 1):
        y[offsets[e] : offsets[e + 1]] = rows[offsets[e] : offsets[e + 1]] @ np.asarray(weights[e], np.float64).T
    return y


def grouped_gemm_silu(weights: np.ndarray, x: np.ndarray, offsets: np.ndarray, sorted_rows: np.ndarray, gather_slots: int) -> np.ndarray:
    """y [total, n] = silu(gate) * up; an expert's 2 n rows are gate rows, then up rows."""
    gate, up = np.split(grouped_gemm(weights, x, offsets, sorted_rows, gather_slots), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def output_gate(o: np.ndarray, proj: np.ndarray, heads: int, head_dim: int) -> np.ndarray:
    """float64 o * sigmoid(gate); proj holds per head a query, then its gate."""
    gate = to_f32(proj)[:, : heads * 2 * head_dim].reshape(-1, heads, 2, head_dim)[:, :, 1].reshape(o.shape).astype(np.float64)
    return to_f32(o) / (1 + np.exp(-gate))
