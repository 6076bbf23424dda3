"""metal/grouped_gemm.metal (P1, P2, P3) against tests/reference/linear.py, over block maps of tests/reference/moe.py."""

import numpy as np
import pytest

from tests.kernels.comparing import assert_close
from tests.kernels.harness import bf16, poison, run
from tests.reference import linear, moe, quant


def routing(rng, kind, rows, slots, experts):
    """expert ids [rows, slots]: `uneven` leaves experts empty and favours the first, `one` sends all to one expert."""
    if kind == "one":
        return np.full((rows, slots), experts - 1, np.uint32)
    share = rng.dirichlet(np.full(experts - 1, 0.3))
    ids = rng.choice(experts - 1, (rows, slots), p=share).astype(np.uint32)
    return ids + (ids >= experts // 2)     # the middle expert has no row


@pytest.mark.parametrize("tile", [32, 16])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(
    "bits, group, kind, rows, slots, experts, n, k",
    [
        (4, 64, "uneven", 33, 8, 33, 128, 256),
        (4, 64, "one", 65, 1, 5, 96, 64),
        (8, 64, "uneven", 31, 3, 9, 64, 128),
        (4, 32, "uneven", 16, 2, 4, 72, 64),
        (4, 128, "uneven", 16, 2, 4, 64, 128),
        (8, 32, "one", 3, 1, 2, 64, 64),
        (8, 128, "uneven", 16, 2, 4, 64, 128),
        (4, 64, "uneven", 1, 9, 257, 64, 2048),
        (4, 64, "uneven", 17, 9, 12, 1024, 2048),
        (4, 64, "uneven", 17, 9, 12, 2048, 512),
    ],
)
def test_grouped_gemm(tile, gather, bits, group, kind, rows, slots, experts, n, k):
    rng = np.random.default_rng(rows + n + k)
    w, s, b = quant.random_matrix(rng, (experts, n, k), bits, group)
    ids, total = routing(rng, kind, rows, slots, experts), rows * slots
    max_blocks = -(-total // tile) + min(experts, total)
    offsets, sorted_rows, _, block_map = moe.route_plan(ids, experts, tile, max_blocks)
    x = bf16(rng.normal(0, 1, (rows if gather else total, k)))
    y = poison((total + 3, n + 8), np.uint16)      # rows and columns of padding that must stay as they are
    args = {"n": n, "k": k, "ldx": k, "ldy": n + 8, "gather_slots": slots if gather else 0, "experts": experts}
    run("grouped_gemm", f"grouped_gemm_bf16_b{bits}_g{group}_m{tile}", {0: w, 1: s, 2: b, 3: x, 4: y, 6: block_map, 7: sorted_rows},
        ("GroupedGemmArgs", args), 5, (-(-n // 64), max_blocks, 1), (128, 1, 1))
    assert (y[total:] == 0xFFFF).all() and (y[:, n:] == 0xFFFF).all()
    weights = np.zeros((experts, n, k), np.float32)
    used = np.unique(ids)
    weights[used] = quant.expand(w[used], s[used], b[used], bits, group)
    assert_close(np.ascontiguousarray(y[:total, :n]), linear.grouped_gemm(weights, x, offsets, sorted_rows, slots if gather else 0))


def test_experts_kept_elsewhere_leave_their_rows_alone():
    rng = np.random.default_rng(3)
    w, s, b = quant.random_matrix(rng, (2, 64, 64), 4, 64)
    ids = np.array([[0, 2], [1, 2]], np.uint32)
    offsets, sorted_rows, _, block_map = moe.route_plan(ids, 3, 32, 6)
    x, y = bf16(rng.normal(0, 1, (2, 64))), poison((4, 64), np.uint16)
    args = {"n": 64, "k": 64, "ldx": 64, "ldy": 64, "gather_slots": 2, "experts": 2}
    run("grouped_gemm", "grouped_gemm_bf16_b4_g64_m32", {0: w, 1: s, 2: b, 3: x, 4: y, 6: block_map, 7: sorted_rows}, ("GroupedGemmArgs", args), 5, (1, 6, 1), (128, 1, 1))
    assert_close(y[:2], linear.grouped_gemm(quant.expand(w, s, b, 4, 64), x, offsets[:3], sorted_rows[:2], 2))
    assert (y[2:] == 0xFFFF).all()
