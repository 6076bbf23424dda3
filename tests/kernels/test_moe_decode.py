"""metal/moe_decode.metal (D4) against tests/reference/fused.py, and against the composition of the separate kernels."""

from functools import partial

import numpy as np
import pytest

from tests.kernels.compare import assert_close, check, team_switches
from tests.kernels.harness import bf16, poison
from tests.reference import fused, quant

FORMATS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
TINY = {"k": 256, "width": 64, "experts": 32, "top_k": 8, "shared": 1}
REAL = {"k": 2048, "width": 512, "experts": 16, "top_k": 8, "shared": 1}        # fewer experts than the 35B, for the memory
ROUTED = {"k": 2048, "width": 32, "experts": 256, "top_k": 8, "shared": 1}      # the 35B's routing


def gate_up_case(dims, bits=4, group=64, normed=1, topk=1, normalise=1, matrices=None, logits=None, seed=0):
    rng = np.random.default_rng(seed)
    k, width, experts, slots = dims["k"], dims["width"], dims["experts"], dims["top_k"] + dims["shared"]
    matrices = experts + dims["shared"] if matrices is None else matrices
    matrix = quant.random_matrix(rng, (matrices, 2 * width, k), bits, group)
    h, g = bf16(rng.normal(0, 0.2, k)), rng.normal(1, 0.3, k).astype(np.float32)
    if logits is None:
        logits = rng.normal(0, 2, experts + 1).astype(np.float32)
    ids, weights = poison(slots, np.uint32), poison(slots, np.float32)
    if not topk:
        ids[:] = rng.permutation(experts + dims["shared"])[:slots]
    args = {"slots": slots, "top_k": dims["top_k"], "experts": experts, "width": width, "k": k, "matrices": matrices,
            "eps": 1e-6, "normed": normed, "topk": topk, "normalise": normalise}
    return [*matrix, h, poison((slots, width), np.uint16), g, logits, ids, weights], args, fused.quantised(bits, group)


def gate_up(case, bits, group, grid, threads, blocks=1, prefetch=False):
    buffers, args, dense = case
    got = check("moe_decode", f"moe_gate_up_b{bits}_g{group}", partial(fused.moe_gate_up, dense=dense), buffers,
                ("MoeGateUpArgs", args), (grid, args["slots"]), threads, args_index=5,
                constants=team_switches(blocks, prefetch))
    composed = [b.copy() for b in buffers]
    fused.moe_gate_up(*composed, args, dense=dense, between=fused.through_bf16)
    assert_close(got[4], composed[4], rtol=2**-5, atol=2**-5)
    return got


@pytest.mark.parametrize("bits,group", FORMATS)
def test_gate_up_formats(bits, group):
    gate_up(gate_up_case(TINY, bits, group), bits, group, 2, 32)


@pytest.mark.parametrize("normed", [0, 1])
@pytest.mark.parametrize("topk", [0, 1])
@pytest.mark.parametrize("grid,threads", [(1, 32), (4, 32), (3, 64), (40, 32)])
def test_gate_up_tiny(normed, topk, grid, threads):
    gate_up(gate_up_case(TINY, normed=normed, topk=topk), 4, 64, grid, threads)


@pytest.mark.parametrize("normed,topk,grid,threads", [(1, 1, 64, 64), (1, 1, 2, 64), (1, 1, 3, 32), (0, 0, 64, 64)])
def test_gate_up_shape_of_the_35b(normed, topk, grid, threads):
    gate_up(gate_up_case(REAL, normed=normed, topk=topk), 4, 64, grid, threads)


@pytest.mark.parametrize("blocks", [2, 8])
def test_gate_up_with_several_blocks_a_thread(blocks):
    gate_up(gate_up_case(TINY if blocks == 2 else REAL), 4, 64, 2, 32, blocks)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("normalise", [0, 1])
def test_routing_of_256_experts(seed, normalise):
    gate_up(gate_up_case(ROUTED, normalise=normalise, seed=seed), 4, 64, 2, 64)


@pytest.mark.parametrize("values", ["equal", "two", "infinite", "large"])
def test_ties_go_to_the_lowest_id(values):
    logits = np.zeros(TINY["experts"] + 1, np.float32)
    if values == "two":
        logits[[3, 9, 20, 31]] = 1
    elif values == "infinite":
        logits[:26] = -np.inf
    elif values == "large":
        logits[:] = np.tile([1000, -1000, 999], 11)
    got = gate_up(gate_up_case(TINY, logits=logits), 4, 64, 2, 32)
    if values == "equal":
        np.testing.assert_array_equal(got[7], [*range(8), 32])


@pytest.mark.parametrize("experts,top_k,shared", [(8, 2, 1), (33, 4, 0), (512, 16, 2), (5, 5, 1)])
def test_other_routings(experts, top_k, shared):
    gate_up(gate_up_case({"k": 128, "width": 32, "experts": experts, "top_k": top_k, "shared": shared}), 4, 64, 2, 32)


def test_gate_up_skips_an_expert_kept_elsewhere():
    got = gate_up(gate_up_case(TINY, matrices=TINY["experts"]), 4, 64, 2, 32)
    assert (got[4][8] == 0xFFFF).all() and got[7][8] == 32


def down(n, k, slots, matrices, bits, group, grid, threads, foreign=False, blocks=1, prefetch=False):
    rng = np.random.default_rng(n + k)
    matrix, dense = quant.random_matrix(rng, (matrices, n, k), bits, group), fused.quantised(bits, group)
    ids = rng.permutation(matrices)[:slots].astype(np.uint32)
    weights, act = rng.uniform(0, 0.5, slots).astype(np.float32), bf16(rng.normal(0, 1, (slots, k)))
    if foreign:
        ids[-1], act[-1] = matrices, 0xFFFF       # its activation was never written
    buffers = [*matrix, act, bf16(rng.normal(0, 3, n)), ids, weights]
    args = {"slots": slots, "n": n, "k": k, "matrices": matrices}
    got = check("moe_decode", f"moe_down_add_b{bits}_g{group}", partial(fused.moe_down_add, dense=dense), buffers,
                ("MoeDownArgs", args), (grid,), threads, args_index=5, constants=team_switches(blocks, prefetch))
    composed = [b.copy() for b in buffers]
    fused.moe_down_add(*composed, args, dense=dense, between=fused.through_bf16)
    assert_close(got[4], composed[4], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("bits,group", FORMATS)
def test_down_formats(bits, group):
    down(256, 128, 9, 33, bits, group, 3, 32)


@pytest.mark.parametrize("n,k,slots,grid,threads", [(256, 64, 9, 2, 32), (67, 64, 9, 1, 32), (256, 64, 1, 2, 32), (64, 512, 3, 4, 64), (130, 512, 9, 2, 96)])
def test_down_teams(n, k, slots, grid, threads):
    down(n, k, slots, 12, 4, 64, grid, threads)


@pytest.mark.parametrize("k,slots,blocks", [(64, 9, 2), (512, 9, 8), (512, 9, 4), (64, 2, 8)])
def test_down_with_several_blocks_a_thread(k, slots, blocks):
    down(130, k, slots, 12, 4, 64, 2, 32, blocks=blocks)


@pytest.mark.parametrize("grid,threads", [(128, 160), (5, 160), (16, 32)])
def test_down_shape_of_the_35b(grid, threads):
    down(2048, 512, 9, 16, 4, 64, grid, threads)


def test_down_skips_an_expert_kept_elsewhere():
    down(256, 64, 9, 32, 4, 64, 2, 32, foreign=True)


def test_both_launches_with_prefetched_rows():
    gate_up(gate_up_case(REAL), 4, 64, 64, 64, prefetch=True)
    gate_up(gate_up_case(TINY, matrices=TINY["experts"]), 4, 64, 2, 32, prefetch=True)
    down(67, 512, 9, 12, 4, 64, 3, 160, prefetch=True)
    down(67, 64, 9, 33, 4, 64, 2, 32, foreign=True, prefetch=True)


@pytest.mark.parametrize("grid,threads", [(1, 32), (2, 32), (3, 64)])
def test_both_launches_with_whole_rows_a_thread(grid, threads):
    for normed in (0, 1):
        gate_up(gate_up_case(REAL, normed=normed), 4, 64, grid, threads, blocks=0)
        gate_up(gate_up_case(TINY, 8, 32, normed=normed, topk=0), 8, 32, grid, threads, blocks=0)
    down(2048, 512, 9, 16, 4, 64, grid, threads, blocks=0)
    down(67, 64, 9, 33, 8, 32, grid, threads, blocks=0)
    down(256, 64, 9, 32, 4, 64, grid, threads, foreign=True, blocks=0)
