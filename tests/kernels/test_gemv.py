"""metal/gemv.metal (D1) against tests/reference/linear.py."""

import numpy as np
import pytest

from tests.kernels.comparing import assert_close
from tests.kernels.harness import bf16, poison, run
from tests.reference import linear, quant

PAD = 24   # columns between a row's end and the next: never read as x, never written in y


def run_gemv(bits, group, out, rows, n, k, grid, threads, seed=0):
    rng = np.random.default_rng(seed + n + k)
    w, s, b = quant.random_matrix(rng, (n, k), bits, group)
    x = poison((rows, k + PAD), np.uint16)
    x[:, :k] = bf16(rng.normal(0, 1, (rows, k)))
    y = poison((rows, n + PAD), np.float32 if out == "f32" else np.uint16)
    before = y.copy()
    args = {"rows": rows, "n": n, "k": k, "ldx": k + PAD, "ldy": n + PAD}
    run("gemv", f"gemv_{out}_b{bits}_g{group}", {0: w, 1: s, 2: b, 3: x, 4: y}, ("GemvArgs", args), 5, (grid, rows, 1), (threads, 1, 1))
    assert np.array_equal(y[:, n:].view(np.uint8), before[:, n:].view(np.uint8))
    assert_close(np.ascontiguousarray(y[:, :n]), linear.gemv(quant.dequantise(w, s, b, bits, group), np.ascontiguousarray(x[:, :k])))


@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_formats(out, bits, group):
    run_gemv(bits, group, out, 2, 65, 384, 3, 64)


@pytest.mark.parametrize("n", [1, 3, 31, 33, 64, 65])
@pytest.mark.parametrize("k", [64, 128, 256, 320, 512, 1024, 1088])
def test_row_counts_and_lane_groups(n, k):
    run_gemv(4, 64, "f32", 1, n, k, 2, 64)


@pytest.mark.parametrize("grid, threads", [(1, 32), (1, 64), (7, 32), (64, 64)])
def test_any_grid_covers_the_rows(grid, threads):
    run_gemv(4, 64, "bf16", 3, 257, 256, grid, threads)


@pytest.mark.parametrize(
    "bits, n, k, grid",
    [(4, 12352, 2048, 1544), (4, 9216, 2048, 16), (4, 2048, 4096, 256), (4, 1024, 2048, 128), (4, 2048, 512, 128), (8, 257, 2048, 33)],
)
def test_shapes_of_the_35b(bits, n, k, grid):
    run_gemv(bits, 64, "bf16", 1, n, k, grid, 64)


@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("n, k", [(33, 64), (257, 2048)])
def test_unquantised(out, n, k):
    rng = np.random.default_rng(n)
    w, x = bf16(rng.normal(0, 0.05, (n, k))), bf16(rng.normal(0, 1, (2, k)))
    y = poison((2, n), np.float32 if out == "f32" else np.uint16)
    run("gemv", f"gemv_{out}_w16", {0: w, 3: x, 4: y}, ("GemvArgs", {"rows": 2, "n": n, "k": k, "ldx": k, "ldy": n}), 5, (3, 2, 1), (64, 1, 1))
    assert_close(y, linear.gemv(quant.to_f32(w), x))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("per_slot", [0, 1])
@pytest.mark.parametrize("rows, slots, experts, n, k", [(1, 9, 33, 128, 256), (3, 9, 33, 256, 64), (1, 9, 257, 96, 2048), (1, 9, 9, 2048, 512)])
def test_experts(bits, per_slot, rows, slots, experts, n, k):
    rng = np.random.default_rng(experts + n)
    w, s, b = quant.random_matrix(rng, (experts, n, k), bits, 64)
    ids = np.stack([rng.permutation(experts)[:slots] for _ in range(rows)]).astype(np.uint32)
    ids[0, 0] = experts - 1
    x = bf16(rng.normal(0, 1, (rows * slots if per_slot else rows, k)))
    y = poison((rows * slots, n), np.uint16)
    args = {"rows": rows, "slots": slots, "n": n, "k": k, "ldx": k, "ldy": n, "per_slot": per_slot, "experts": experts}
    run("gemv", f"moe_gemv_bf16_b{bits}_g64", {0: w, 1: s, 2: b, 3: x, 4: y, 6: ids}, ("MoeGemvArgs", args), 5, (4, rows * slots, 1), (64, 1, 1))
    chosen = np.unique(ids)
    weights = {e: quant.dequantise(w[e], s[e], b[e], bits, 64) for e in chosen}
    assert_close(y, linear.moe_gemv(weights, x, ids, bool(per_slot)))


def test_an_expert_kept_elsewhere_is_skipped():
    rng = np.random.default_rng(5)
    w, s, b = quant.random_matrix(rng, (4, 64, 256), 4, 64)
    ids = np.array([[1, 4, 0xFFFFFFFF]], np.uint32)
    x, y = bf16(rng.normal(0, 1, (1, 256))), poison((3, 64), np.uint16)
    args = {"rows": 1, "slots": 3, "n": 64, "k": 256, "ldx": 256, "ldy": 64, "per_slot": 0, "experts": 4}
    run("gemv", "moe_gemv_bf16_b4_g64", {0: w, 1: s, 2: b, 3: x, 4: y, 6: ids}, ("MoeGemvArgs", args), 5, (1, 3, 1), (64, 1, 1))
    assert_close(y[:1], linear.gemv(quant.dequantise(w[1], s[1], b[1], 4, 64), x))
    assert (y[1:] == 0xFFFF).all()
