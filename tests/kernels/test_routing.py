"""metal/routing.metal (P2) against tests/reference/moe.py."""

import numpy as np
import pytest

from tests.kernels.comparing import assert_close
from tests.kernels.harness import bf16, poison, run
from tests.reference import moe


def run_topk(logits, shared, experts, top_k, shared_slots, normalise=1):
    rows, slots = len(logits), top_k + shared_slots
    ids, weights = poison((rows, slots), np.uint32), poison((rows, slots), np.float32)
    args = {"rows": rows, "experts": experts, "top_k": top_k, "shared_slots": shared_slots, "ld": logits.shape[1], "ld_shared": shared.shape[1], "normalise": normalise}
    run("routing", "router_topk", {0: logits, 1: shared, 2: ids, 3: weights}, ("RouterArgs", args), 4, (rows, 1, 1), (32, 1, 1))
    return ids, weights


@pytest.mark.parametrize("normalise", [1, 0])
@pytest.mark.parametrize("rows, experts, top_k, shared_slots", [(1, 32, 8, 1), (33, 256, 8, 1), (3, 5, 2, 0), (2, 512, 16, 2), (1, 1, 1, 1)])
def test_router_topk(normalise, rows, experts, top_k, shared_slots):
    rng = np.random.default_rng(experts)
    logits = rng.normal(0, 2, (rows, experts + 3)).astype(np.float32)
    logits[:, experts:] = np.nan                     # columns of other projections
    shared = rng.normal(0, 2, (rows, max(1, shared_slots))).astype(np.float32)
    ids, weights = run_topk(logits, shared, experts, top_k, shared_slots, normalise)
    expected_ids, expected = moe.router_topk(logits, shared, experts, top_k, shared_slots, bool(normalise))
    assert np.array_equal(ids, expected_ids)
    assert_close(weights, expected, 2e-6)


def test_ties_go_to_the_lowest_id():
    logits = np.zeros((2, 256), np.float32)
    logits[1] = -1e30
    logits[1, [200, 40, 7, 100]] = 3.0
    ids, weights = run_topk(logits, np.zeros((2, 1), np.float32), 256, 8, 1)
    assert ids[0].tolist() == [*range(8), 256] and ids[1].tolist() == [7, 40, 100, 200, 0, 1, 2, 3, 256]
    assert np.allclose(weights[0, :8], 1 / 8) and np.allclose(weights[1, :4], 1 / 4) and (weights[:, 8] == 0.5).all()


def test_nan_logits_give_ids_of_the_table_and_nan_weights():
    logits = np.full((1, 32), np.nan, np.float32)
    ids, weights = run_topk(logits, np.zeros((1, 1), np.float32), 32, 8, 1)
    assert len(set(ids[0, :8].tolist())) == 8 and (ids[0, :8] < 32).all() and np.isnan(weights[0, :8]).all()


@pytest.mark.parametrize("tile", [32, 16])
@pytest.mark.parametrize("rows, slots, experts", [(1, 1, 1), (1, 9, 33), (3, 9, 257), (65, 9, 257), (31, 3, 512), (33, 2, 544), (1024, 9, 257)])
def test_route_plan(tile, rows, slots, experts):
    rng = np.random.default_rng(rows * slots)
    ids = rng.choice(experts, (rows, slots), p=rng.dirichlet(np.full(experts, 0.2))).astype(np.uint32)
    check_plan(ids, experts, tile)


@pytest.mark.parametrize("expert", [0, 100, 256])
def test_one_expert_takes_everything(expert):
    check_plan(np.full((4097, 8), expert, np.uint32), 257, 32)   # 32,776 pairs: more than 16 bits signed hold


def check_plan(ids, experts, tile):
    total = ids.size
    max_blocks = -(-total // tile) + min(experts, total)
    offsets, sorted_rows, row_pos = (poison(n, np.uint32) for n in (experts + 1, total, total))
    block_map = poison((max_blocks, 4), np.uint32)
    args = {"total": total, "experts": experts, "tile": tile, "max_blocks": max_blocks}
    run("routing", "route_plan", {0: ids, 1: offsets, 2: sorted_rows, 3: row_pos, 4: block_map}, ("RouteArgs", args), 5, (1, 1, 1), (256, 1, 1))
    for actual, expected in zip((offsets, sorted_rows, row_pos, block_map), moe.route_plan(ids, experts, tile, max_blocks)):
        assert np.array_equal(actual, expected)


@pytest.mark.parametrize("tile, tail_tile", [(32, 16), (32, 8), (16, 8)])
@pytest.mark.parametrize("rows, slots, experts", [(1, 9, 33), (3, 9, 257), (65, 9, 257), (300, 3, 40), (33, 2, 544), (1024, 9, 257)])
def test_route_plan_split(tile, tail_tile, rows, slots, experts):
    """P3: rests of experts go to the tail list; together the lists hold every sorted row once."""
    rng = np.random.default_rng(rows + slots)
    ids = rng.choice(experts, (rows, slots), p=rng.dirichlet(np.full(experts, 0.2))).astype(np.uint32)
    total, max_tail = ids.size, min(experts, ids.size)
    max_blocks = -(-total // tile) + max_tail
    offsets, sorted_rows, row_pos = (poison(n, np.uint32) for n in (experts + 1, total, total))
    block_map, tail_map = poison((max_blocks, 4), np.uint32), poison((max_tail, 4), np.uint32)
    args = {"total": total, "experts": experts, "tile": tile, "max_blocks": max_blocks, "tail_tile": tail_tile, "max_tail": max_tail}
    buffers = {0: ids, 1: offsets, 2: sorted_rows, 3: row_pos, 4: block_map, 6: tail_map}
    run("routing", "route_plan_split", buffers, ("RouteSplitArgs", args), 5, (1, 1, 1), (256, 1, 1))
    expected = moe.route_plan_split(ids, experts, tile, max_blocks, tail_tile, max_tail)
    for actual, wanted in zip((offsets, sorted_rows, row_pos, block_map, tail_map), expected):
        assert np.array_equal(actual, wanted)
    used = np.concatenate([m[m[:, 0] != moe.NO_EXPERT] for m in (block_map, tail_map)])
    assert np.array_equal(np.sort(np.concatenate([np.arange(first, first + n) for _, first, n, _ in used])), np.arange(total))


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("rows, n, slots", [(1, 256, 9), (33, 2048, 9), (65, 64, 1), (3, 520, 2)])
def test_moe_combine(ordered, rows, n, slots):
    rng = np.random.default_rng(rows + n)
    h, y = bf16(rng.normal(0, 1, (rows, n))), bf16(rng.normal(0, 1, (rows * slots, n)))
    weights = rng.uniform(0, 1, (rows, slots)).astype(np.float32)
    row_pos = rng.permutation(rows * slots).astype(np.uint32)
    expected = moe.moe_combine(h, y, weights, row_pos if ordered else None)
    run("routing", "moe_combine", {0: h, 1: y, 2: weights, 3: row_pos}, ("CombineArgs", {"rows": rows, "n": n, "slots": slots, "sorted": ordered}), 4, (-(-n // 512), rows, 1), (64, 1, 1))
    assert_close(h, expected, 1e-6)
