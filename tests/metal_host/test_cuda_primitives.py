"""Primitives of the CUDA standard library against numpy, on the device."""
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from . import cuda_driver

SOURCE = Path(__file__).parent / "cuda_primitives.metal"
FRONTEND = Path(__file__).parents[2] / "src/metal_host/frontend"
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    if cuda_driver.NVRTC is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed (extra `cuda`)")
    try:
        return cuda_driver.Device()
    except (OSError, RuntimeError) as error:
        pytest.skip(f"no NVIDIA GPU: {error}")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """CUDA text and manifest; from LILY_CUDA_TEXT (path without .cu) where the front end's compiler is not installed."""
    if made := os.environ.get("LILY_CUDA_TEXT"):
        return Path(f"{made}.cu").read_text(), json.loads(Path(f"{made}.cuda.json").read_text())
    pytest.importorskip("ziglang", reason="ziglang is not installed: Metal source cannot be read here")
    sys.path.insert(0, str(FRONTEND))
    try:
        import amalgamate
        import cuda
        return cuda.translate(amalgamate.amalgamate(SOURCE), SOURCE.name, tmp_path_factory.mktemp("cuda"))
    finally:
        sys.path.remove(str(FRONTEND))


def bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def poisoned(*shape, dtype=np.float32):
    return np.frombuffer(b"\xff" * (int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape).copy()


def test_simd_reductions(device, kernels):
    rng = np.random.default_rng(1)
    x, u = rng.normal(size=64).astype(np.float32), rng.integers(0, 2**32, 64, dtype=np.uint32)
    f, out = poisoned(3, 64), poisoned(3, 64, dtype=np.uint32)
    device.run(*kernels, "simd_operations", [x, u, f, out], (64,), (64,))
    rows = x.reshape(2, 32).copy()
    tree = rows
    while tree.shape[1] > 1:                                       # pairs at distance 16, 8, 4, 2, 1
        half = tree.shape[1] // 2
        tree = tree[:, :half] + tree[:, half:]
    assert np.array_equal(f[0].reshape(2, 32), np.repeat(tree, 32, 1))
    assert np.array_equal(f[1].reshape(2, 32), np.repeat(rows.max(1, keepdims=True), 32, 1))
    assert np.allclose(f[2].reshape(16, 4), x.reshape(16, 4).sum(1, keepdims=True), atol=1e-6)
    assert np.array_equal(out[0].reshape(2, 32), np.repeat(u.reshape(2, 32).min(1, keepdims=True), 32, 1))
    low = (u & 0xFFFF).reshape(2, 32)
    assert np.array_equal(out[1].reshape(2, 32), np.cumsum(low, 1) - low)
    assert np.array_equal(out[2].reshape(2, 32), np.repeat(low.sum(1, keepdims=True), 32, 1))


def test_simd_moves(device, kernels):
    u = np.random.default_rng(2).integers(0, 2**32, 32, dtype=np.uint32)
    out, lane = poisoned(7, 32, dtype=np.uint32), np.arange(32)
    device.run(*kernels, "simd_moves", [u, out], (32,), (32,))
    assert np.array_equal(out[0], u[lane ^ 5]) and np.array_equal(out[1], u[31 - lane])
    assert np.array_equal(out[2], np.where(lane < 3, u, u[(lane - 3) % 32])) and np.array_equal(out[3], np.where(lane > 28, u, u[(lane + 3) % 32]))
    assert np.array_equal(out[4], u[(lane - 3) % 32])
    assert (out[5] == sum(int(v & 1) << n for n, v in enumerate(u))).all() and (out[6] == (u[7] & 0xFFFF)).all()


@pytest.mark.parametrize("left, right", [("bf", "bf"), ("f", "bf"), ("bf", "f"), ("f", "f"), ("h", "h")])
def test_matrices(device, kernels, left, right):
    rng = np.random.default_rng(3)

    def operand(kind):
        x = rng.normal(size=(8, 8)).astype(np.float32)
        if kind == "bf":
            return bf16(x), from_bf16(bf16(x))
        return (x.astype(np.float16), x.astype(np.float16).astype(np.float32)) if kind == "h" else (x, x)

    (a, a_value), (b, b_value) = operand(left), operand(right)
    d = poisoned(4, 2, 8, 8)
    device.run(*kernels, f"matrix_{left}_{right}", [a, b, d], (32,), (32,))
    for n in range(4):
        expected = (a_value.T if n & 2 else a_value).astype(np.float64) @ (b_value.T if n & 1 else b_value) + 0.5
        assert np.abs(d[n, 0] - expected).max() < 2e-6, n
        assert np.array_equal(d[n, 1], d[n, 0].T)


def test_conversions_round_to_nearest_even(device, kernels):
    rng = np.random.default_rng(4)
    x = np.concatenate([rng.normal(0, 20, 250), [1.00390625, 1.01171875, np.inf, -np.inf, np.nan, 1e-40]]).astype(np.float32)
    b, h, e = poisoned(256, dtype=np.uint16), poisoned(256, dtype=np.float16), poisoned(256)
    args = np.array([(256, 2.0)], [("n", np.uint32), ("factor", np.float32)])
    device.run(*kernels, "conversions", [x, b, h, e, args], (256,), (64,))
    number = ~np.isnan(x)
    assert np.array_equal(b[number], bf16(x)[number]) and np.isnan(from_bf16(b)[~number]).all()
    assert np.array_equal(h[number], x.astype(np.float16)[number])
    exact = 2 * np.exp(x.astype(np.float64))
    finite = number & (exact < 1e37) & (exact > 1e-37)
    assert (np.abs(e[finite] / exact[finite] - 1) < 3e-7).all()
    device.run(*kernels, "conversions", [x, b, h, e, args], (256,), (64,), {0: 1})
    assert (np.abs(2 * e[finite] / exact[finite] - 1) < 3e-7).all()


def test_integers(device, kernels):
    u = np.random.default_rng(5).integers(0, 2**32, 64, dtype=np.uint32)
    u[:3] = 0, 1, 0xFFFFFFFF
    out = poisoned(6, 64, dtype=np.uint32)
    device.run(*kernels, "integers", [u, out], (64,), (32,))
    text = [f"{v:032b}" for v in u.tolist()]
    assert out[0].tolist() == [t.count("1") for t in text] and out[1].tolist() == [32 - v.bit_length() for v in u.tolist()]
    assert out[2].tolist() == [v * 0xD2511F53 >> 32 for v in u.tolist()] and out[3].tolist() == [int(t[::-1], 2) for t in text]
    assert out[4].tolist() == [v >> 5 & 127 for v in u.tolist()] and out[5].tolist() == [(v << 9 | v >> 23) & 0xFFFFFFFF for v in u.tolist()]


def test_atomics(device, kernels):
    u = np.random.default_rng(6).integers(0, 2**32, 1024, dtype=np.uint32)
    out, total = np.zeros(17, np.uint32), np.zeros(1, np.float32)
    device.run(*kernels, "atomics", [u, out, total], (1024,), (256,))
    assert np.array_equal(out[:16], np.bincount(u & 15, minlength=16)) and out[16] == u.max() and total[0] == 1024


@pytest.mark.parametrize("grid, group", [((50, 3), (16, 2)), ((7, 1), (7, 1)), ((64, 1), (64, 1)), ((45, 1), (32, 1))])
def test_edge_threadgroups_shrink(device, kernels, grid, group):
    out = poisoned(grid[1], grid[0], dtype=np.uint32)
    device.run(*kernels, "ragged_places", [out], grid, group)
    for y in range(grid[1]):
        for x in range(grid[0]):
            width, height = min(group[0], grid[0] - x // group[0] * group[0]), min(group[1], grid[1] - y // group[1] * group[1])
            index = x % group[0] + y % group[1] * width
            lanes = min(32, width * height - index // 32 * 32)
            assert out[y, x] == width * height | width << 8 | height << 16 | lanes << 24
