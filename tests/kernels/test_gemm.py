"""metal/gemm.metal (P1) against tests/reference/linear.py: weights are rounded to bf16 in the tile and nowhere else."""

import numpy as np
import pytest

from lily.plans.geometry import tile_columns, tile_threads
from tests.kernels.comparing import assert_close
from tests.kernels.harness import bf16, poison, run
from tests.reference import linear, quant

PAD = 8


TILES = {"gemm": [32], "gemm_tensor": [32, 64], "gemm_solo_tensor": [32, 64]}  # P6 and its control: family, rows of its tiles
UNITS = [(family, tile) for family, tiles in TILES.items() for tile in tiles]


def run_gemm(unit, bits, group, out, rows, n, k, seed=0):
    family, tile = unit
    rng = np.random.default_rng(seed + n + k + rows)
    if bits == 16:
        w = bf16(rng.normal(0, 0.05, (n, k)))
        buffers, weights, name = {0: w}, quant.to_f32(w), f"{family}_{out}_w16_m{tile}"
    else:
        w, s, b = quant.random_matrix(rng, (n, k), bits, group)
        buffers, weights, name = {0: w, 1: s, 2: b}, quant.expand(w, s, b, bits, group), f"{family}_{out}_b{bits}_g{group}_m{tile}"
    x = poison((rows, k + PAD), np.uint16)
    x[:, :k] = bf16(rng.normal(0, 1, (rows, k)))
    y = poison((rows, n + PAD), np.float32 if out == "f32" else np.uint16)
    before = y.copy()
    args = {"rows": rows, "n": n, "k": k, "ldx": k + PAD, "ldy": n + PAD}
    run(family, name, {**buffers, 3: x, 4: y}, ("GemmArgs", args), 5, (-(-n // tile_columns(tile, family)), -(-rows // tile), 1), (tile_threads(family), 1, 1))
    assert np.array_equal(y[:, n:].view(np.uint8), before[:, n:].view(np.uint8))
    assert_close(np.ascontiguousarray(y[:, :n]), linear.gemm(weights, np.ascontiguousarray(x[:, :k])))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("bits, group", [(4, 32), (4, 64), (4, 128), (8, 32), (8, 64), (8, 128), (16, 0)])
def test_formats(unit, out, bits, group):
    run_gemm(unit, bits, group, out, 33, 96, 384)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("rows", [1, 3, 31, 33, 64, 65])
@pytest.mark.parametrize("n, k", [(64, 64), (33, 256), (257, 128)])
def test_row_counts(unit, rows, n, k):
    run_gemm(unit, 4, 64, "f32", rows, n, k)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bits, rows, n, k", [(4, 33, 12352, 2048), (4, 64, 2048, 4096), (4, 65, 1024, 2048), (4, 31, 2048, 512), (8, 65, 257, 2048)])
def test_shapes_of_the_35b(unit, bits, rows, n, k):
    run_gemm(unit, bits, 64, "bf16", rows, n, k)
