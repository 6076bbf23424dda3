"""RMSNorm kernels against numpy: tiny and 35B widths, any threadgroup size."""

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import bf16, poison
from tests.reference import norm

SHAPES = [(1, 64), (1, 256), (3, 256), (33, 256), (1, 2048), (5, 2048), (2, 2056), (2, 8)]


def inputs(rows: int, n: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return bf16(rng.normal(0, 2, (rows, n))), bf16(rng.normal(0, 1, (rows, n))), rng.normal(1, 0.3, n).astype(np.float32)


@pytest.mark.parametrize("threads", [32, 64, 160, 256])
@pytest.mark.parametrize("rows,n", SHAPES)
def test_rmsnorm(rows, n, threads):
    x, _, w = inputs(rows, n)
    args = ("NormArgs", {"rows": rows, "n": n, "eps": 1e-6})
    check("norm", "rmsnorm", norm.rmsnorm, [x, w, poison((rows, n), np.uint16)], args, (rows,), threads)


@pytest.mark.parametrize("threads", [32, 128, 256])
@pytest.mark.parametrize("rows,n", SHAPES)
def test_add_rmsnorm(rows, n, threads):
    h, y, w = inputs(rows, n)
    args = ("NormArgs", {"rows": rows, "n": n, "eps": 1e-6})
    out = check("norm", "add_rmsnorm", norm.add_rmsnorm, [h, y, w, poison((rows, n), np.uint16)], args, (rows,), threads)
    expected = h.copy()
    norm.add_rmsnorm(expected, y, w, poison((rows, n), np.uint16), args[1])
    np.testing.assert_array_equal(out[0], expected)   # the residual stream is exact


def test_small_values_depend_on_eps():
    x, _, w = inputs(2, 256)
    x = bf16(np.full((2, 256), 1e-4, np.float32))
    args = ("NormArgs", {"rows": 2, "n": 256, "eps": 1e-6})
    check("norm", "rmsnorm", norm.rmsnorm, [x, w, poison((2, 256), np.uint16)], args, (2,), 32)
