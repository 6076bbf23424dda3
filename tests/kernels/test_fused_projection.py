"""metal/fused_projection.metal against tests/reference/fused.py, and against the composition of the separate kernels."""

from functools import partial

import numpy as np
import pytest

from tests.kernels.compare import assert_close, check, team_switches
from tests.kernels.harness import bf16, poison
from tests.reference import fused, quant

EPS = 1e-6
FORMATS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def near_composition(reference, dense, buffers, args, got, out):
    """The separate kernels round between themselves: within a few bf16 units of the values' size."""
    composed = [b.copy() for b in buffers]
    reference(*composed, args, dense=dense, between=fused.through_bf16)
    assert_close(got[out], composed[out], rtol=2**-6, atol=2**-6)


def projection(function, reference, name, args, buffers, dense, grid, threads, out, blocks=1, prefetch=False):
    got = check("fused_projection", function, partial(reference, dense=dense), buffers, (name, args), (grid,), threads, args_index=5,
                constants=team_switches(blocks, prefetch))
    if args["n"] >= 16:   # a lone output may be the small difference of large terms
        near_composition(reference, dense, buffers, args, got, out)


def norm_case(n, k, bits, group, out, grid, threads, size=1.0, blocks=1, prefetch=False):
    rng = np.random.default_rng(n + k + bits)
    h, g = bf16(rng.normal(0, size, k)), rng.normal(1, 0.3, k).astype(np.float32)
    y = poison(n, np.float32 if out == "f32" else np.uint16)
    if bits == 16:
        none = np.zeros(2, np.uint16)
        matrix, dense, suffix = (bf16(rng.normal(0, 0.05, (n, k))), none, none), fused.unquantised, "w16"
    else:
        matrix, dense, suffix = quant.random_matrix(rng, (n, k), bits, group), fused.quantised(bits, group), f"b{bits}_g{group}"
    args = {"n": n, "k": k, "eps": EPS}
    projection(f"gemv_norm_{out}_{suffix}", fused.gemv_norm, "GemvNormArgs", args, [*matrix, h, y, g], dense, grid, threads, 4, blocks, prefetch)


@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("bits,group", [*FORMATS, (16, 0)])
def test_norm_formats(bits, group, out):
    norm_case(65, 384, bits, group, out, 2, 32)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 16, 17, 33, 67])
@pytest.mark.parametrize("k,threads", [(64, 32), (128, 32), (256, 32), (320, 32), (1024, 32), (1088, 32), (1088, 64), (2048, 64), (4160, 64)])
def test_norm_row_counts_and_teams(n, k, threads):
    norm_case(n, k, 4, 64, "f32", 2, threads)


@pytest.mark.parametrize("grid,threads", [(1, 32), (1, 64), (7, 32), (100, 64)])
def test_norm_any_grid_covers_the_rows(grid, threads):
    norm_case(257, 256, 8, 64, "bf16", grid, threads)


@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_norm_scales_of_h(size):
    norm_case(48, 256, 4, 64, "bf16", 1, 32, size)


@pytest.mark.parametrize("bits,n,grid", [(4, 12352, 772), (4, 9216, 16), (8, 257, 65), (16, 257, 17)])
def test_norm_shapes_of_the_35b(bits, n, grid):
    norm_case(n, 2048, bits, 64, "bf16" if bits == 4 else "f32", grid, 64)


@pytest.mark.parametrize("k,threads,blocks", [(64, 32, 8), (512, 32, 2), (2048, 32, 8), (2112, 64, 4), (16448, 32, 8), (1024, 32, 4)])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_norm_with_several_blocks_a_thread(k, threads, blocks, bits):
    norm_case(67, k, bits, 64, "f32", 2, threads, blocks=blocks)


def gated_norm_case(n, heads, dv, bits, group, grid, threads, blocks=1, prefetch=False):
    rng = np.random.default_rng(heads + dv)
    k = heads * dv
    matrix, dense = quant.random_matrix(rng, (n, k), bits, group), fused.quantised(bits, group)
    o = bf16(rng.normal(0, 1, (heads, dv)) * rng.uniform(0.01, 2, (heads, 1))).reshape(-1)   # heads of very different size
    h, z, g = bf16(rng.normal(0, 3, n)), bf16(rng.normal(0, 2, k)), rng.normal(1, 0.2, dv).astype(np.float32)
    args = {"n": n, "k": k, "dv": dv, "eps": EPS}
    projection(f"gemv_gated_norm_add_b{bits}_g{group}", fused.gemv_gated_norm_add, "GatedNormAddArgs", args,
               [*matrix, o, h, z, g], dense, grid, threads, 4, blocks, prefetch)


@pytest.mark.parametrize("heads,dv,blocks", [(5, 128, 2), (5, 64, 8), (32, 128, 8), (9, 64, 4)])
def test_gated_norm_with_several_blocks_a_thread(heads, dv, blocks):
    gated_norm_case(67, heads, dv, 4, 64, 2, 32, blocks)


@pytest.mark.parametrize("bits,group", FORMATS)
def test_gated_norm_formats(bits, group):
    gated_norm_case(256, 4, 128, bits, group, 3, 32)


@pytest.mark.parametrize("heads,dv,threads", [(1, 128, 32), (2, 64, 32), (3, 64, 32), (6, 64, 32), (3, 128, 32), (9, 128, 32), (9, 128, 64), (40, 128, 128)])
def test_gated_norm_heads(heads, dv, threads):
    gated_norm_case(67, heads, dv, 4, 64, 2, threads)


@pytest.mark.parametrize("grid,threads", [(128, 128), (4, 128), (16, 32)])
def test_gated_norm_shape_of_the_35b(grid, threads):
    gated_norm_case(2048, 32, 128, 4, 64, grid, threads)


def gate_case(n, heads, head_dim, bits, group, grid, threads, blocks=1, prefetch=False):
    rng = np.random.default_rng(heads + head_dim)
    k = heads * head_dim
    matrix, dense = quant.random_matrix(rng, (n, k), bits, group), fused.quantised(bits, group)
    o, h, proj = bf16(rng.normal(0, 1, k)), bf16(rng.normal(0, 3, n)), poison(2 * k + 40, np.uint16)
    proj[: 2 * k] = bf16(rng.normal(0, 2, 2 * k))
    args = {"n": n, "k": k, "head_dim": head_dim}
    projection(f"gemv_gate_add_b{bits}_g{group}", fused.gemv_gate_add, "GateAddArgs", args, [*matrix, o, h, proj], dense, grid, threads, 4, blocks, prefetch)


@pytest.mark.parametrize("heads,head_dim,blocks", [(5, 64, 2), (16, 256, 8)])
def test_gate_with_several_blocks_a_thread(heads, head_dim, blocks):
    gate_case(67, heads, head_dim, 4, 64, 2, 32, blocks)


@pytest.mark.parametrize("bits,group", FORMATS)
def test_gate_formats(bits, group):
    gate_case(256, 4, 64, bits, group, 3, 32)


@pytest.mark.parametrize("n,heads,head_dim,grid,threads", [(67, 3, 64, 1, 32), (67, 5, 256, 2, 64), (2048, 16, 256, 128, 128), (2048, 16, 256, 5, 128)])
def test_gate_heads(n, heads, head_dim, grid, threads):
    gate_case(n, heads, head_dim, 4, 64, grid, threads)


@pytest.mark.parametrize("bits,group", [*FORMATS, (16, 0)])
@pytest.mark.parametrize("n,k,grid,threads", [(67, 2048, 2, 64), (16, 64, 1, 32), (5, 2112, 3, 64), (130, 1024, 1, 32), (33, 4160, 2, 64)])
def test_norm_with_prefetched_rows(bits, group, n, k, grid, threads):
    if not group or k % group == 0:
        norm_case(n, k, bits, group, "f32", grid, threads, prefetch=True)


def test_output_projections_with_prefetched_rows():
    gated_norm_case(67, 32, 128, 4, 64, 3, 128, prefetch=True)
    gated_norm_case(9, 5, 64, 8, 32, 2, 32, prefetch=True)
    gate_case(67, 16, 256, 4, 64, 3, 128, prefetch=True)


@pytest.mark.parametrize("out", ["bf16", "f32"])
@pytest.mark.parametrize("bits,group", [*FORMATS, (16, 0)])
@pytest.mark.parametrize("n,k,grid", [(67, 256, 1), (5, 1024, 2), (1, 128, 1), (130, 4608, 3), (2048, 128, 16)])
def test_norm_with_whole_rows_a_thread(n, k, grid, bits, group, out):
    norm_case(n, k, bits, group, out, grid, 32, blocks=0)
