"""Mixture of experts in numpy (metal/routing.metal, metal/activation.metal's silu_mul)."""

from __future__ import annotations

import numpy as np

from tests.reference.quant import to_f32

NO_EXPERT = 0xFFFFFFFF


def router_topk(logits: np.ndarray, shared_logits: np.ndarray, experts: int, top_k: int, shared_slots: int, normalise: bool = True):
    """expert_ids uint32 and weights float64, both [rows, top_k + shared_slots]; ties go to the lowest id."""
    scores = logits[:, :experts].astype(np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    chosen = np.take_along_axis(p, order, 1)
    if normalise:
        chosen = chosen / chosen.sum(1, keepdims=True)
    shared = np.broadcast_to(experts + np.arange(shared_slots), (len(logits), shared_slots))
    gate = np.repeat(1 / (1 + np.exp(-shared_logits[:, :1].astype(np.float64))), shared_slots, 1)  # one gate for all parts
    return np.concatenate([order, shared], 1).astype(np.uint32), np.concatenate([chosen, gate], 1)


def route_plan(expert_ids: np.ndarray, experts: int, tile: int, max_blocks: int):
    """offsets [experts + 1], sorted_rows and row_pos [total], block_map [max_blocks, 4]: a stable sort by expert."""
    return route_plan_split(expert_ids, experts, tile, max_blocks, 0, 0)[:4]


def route_plan_split(expert_ids: np.ndarray, experts: int, tile: int, max_blocks: int, tail_tile: int, max_tail: int):
    """The same and tail_map [max_tail, 4]: what is left of an expert after whole tiles, if it has at most tail_tile rows."""
    flat = expert_ids.reshape(-1)
    sorted_rows = np.argsort(flat, kind="stable").astype(np.uint32)
    row_pos = np.empty_like(sorted_rows)
    row_pos[sorted_rows] = np.arange(len(flat), dtype=np.uint32)
    counts = np.bincount(flat, minlength=experts)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
    blocks = [(e, offsets[e] + done, min(tile, counts[e] - done), 0) for e in range(experts) for done in range(0, counts[e], tile)]
    return offsets, sorted_rows, row_pos, block_list([b for b in blocks if b[2] > tail_tile], max_blocks), block_list([b for b in blocks if b[2] <= tail_tile], max_tail)


def block_list(blocks: list[tuple[int, int, int, int]], size: int) -> np.ndarray:
    """uint32 [size, 4], unused entries NO_EXPERT."""
    block_map = np.zeros((size, 4), np.uint32)
    block_map[:, 0] = NO_EXPERT
    block_map[: len(blocks)] = np.array(blocks, np.uint32).reshape(-1, 4)
    return block_map


def silu_mul(x: np.ndarray, width: int) -> np.ndarray:
    """float64 [rows, width]: silu(columns 0..width) * columns width..2 width."""
    f = to_f32(x).astype(np.float64)
    gate, up = f[:, :width], f[:, width : 2 * width]
    return gate / (1 + np.exp(-gate)) * up


def moe_combine(h: np.ndarray, y: np.ndarray, weights: np.ndarray, row_pos: np.ndarray | None) -> np.ndarray:
    """float64 h + sum over slots of weight * y; y is in (row, slot) order, or sorted and found through row_pos."""
    rows, slots = weights.shape
    outputs = to_f32(y if row_pos is None else y[row_pos]).astype(np.float64).reshape(rows, slots, -1)
    return to_f32(h) + (outputs * weights[:, :, None]).sum(1)
