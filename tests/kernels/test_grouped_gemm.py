"""metal/grouped_gemm.metal (P1, P2, P3) against tests/reference/linear.py, over block maps of tests/reference/moe.py."""

import numpy as np
import pytest

from lily.plans.geometry import tile_columns, tile_threads
from tests.kernels.comparing import assert_close
from tests.kernels.harness import bf16, device, poison, run
from tests.reference import linear, moe, quant


# P6 and its control, family and rows of a tile
UNITS = [("grouped_gemm", 32), ("grouped_gemm", 16), *((family, rows) for family in ("grouped_gemm_tensor", "grouped_gemm_solo_tensor") for rows in (64, 32, 16))]


def routing(rng, kind, rows, slots, experts):
    """expert ids [rows, slots]: `uneven` leaves experts empty and favours the first, `one` sends all to one expert."""
    if kind == "one":
        return np.full((rows, slots), experts - 1, np.uint32)
    share = rng.dirichlet(np.full(experts - 1, 0.3))
    ids = rng.choice(experts - 1, (rows, slots), p=share).astype(np.uint32)
    return ids + (ids >= experts // 2)     # the middle expert has no row


@pytest.mark.parametrize("unit", UNITS)
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
def test_grouped_gemm(unit, gather, bits, group, kind, rows, slots, experts, n, k):
    (family, tile), rng = unit, np.random.default_rng(rows + n + k)
    w, s, b = quant.random_matrix(rng, (experts, n, k), bits, group)
    ids, total = routing(rng, kind, rows, slots, experts), rows * slots
    max_blocks = -(-total // tile) + min(experts, total)
    offsets, sorted_rows, _, block_map = moe.route_plan(ids, experts, tile, max_blocks)
    x = bf16(rng.normal(0, 1, (rows if gather else total, k)))
    y = poison((total + 3, n + 8), np.uint16)      # rows and columns of padding that must stay as they are
    args = {"n": n, "k": k, "ldx": k, "ldy": n + 8, "gather_slots": slots if gather else 0, "experts": experts}
    run(family, f"{family}_bf16_b{bits}_g{group}_m{tile}", {0: w, 1: s, 2: b, 3: x, 4: y, 6: block_map, 7: sorted_rows},
        ("GroupedGemmArgs", args), 5, (-(-n // tile_columns(tile, family)), max_blocks, 1), (tile_threads(family), 1, 1))
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


class Case:
    """Routed rows, weights [experts, rows_out, k] and their bf16 expansion for the experts in use."""

    def __init__(self, bits, group, rows, slots, experts, rows_out, k, kind="uneven"):
        rng = np.random.default_rng(rows + rows_out + k)
        self.bits, self.group, self.slots, self.experts, self.k, self.total = bits, group, slots, experts, k, rows * slots
        self.ids = routing(rng, kind, rows, slots, experts)
        self.x = bf16(rng.normal(0, 1, (rows, k)))
        self.packed = quant.random_matrix(rng, (experts, rows_out, k), bits, group)
        self.weights = np.zeros((experts, rows_out, k), np.float32)
        used = np.unique(self.ids)
        self.weights[used] = quant.expand(*(part[used] for part in self.packed), bits, group)

    def launch(self, unit, kernel, y, n, block_map, sorted_rows, weights=None):
        """y [total, ldy]: columns 0 .. n of the rows that block_map names."""
        family, tile = unit
        columns = tile_columns(tile, family) // (2 if "silu" in kernel else 1)
        parts = {0: weights} if weights is not None else dict(enumerate(self.packed))
        args = {"n": n, "k": self.k, "ldx": self.k, "ldy": y.shape[1], "gather_slots": self.slots, "experts": self.experts}
        buffers = parts | {3: self.x, 4: y, 6: block_map, 7: sorted_rows}
        run(family, f"{family}_{kernel}_m{tile}", buffers, ("GroupedGemmArgs", args), 5, (-(-n // columns), len(block_map), 1), (tile_threads(family), 1, 1))

    def plan(self, tile):
        return moe.route_plan(self.ids, self.experts, tile, -(-self.total // tile) + min(self.experts, self.total))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "bits, group, rows, slots, experts, width, k",
    [(4, 64, 33, 8, 33, 64, 256), (4, 64, 9, 8, 12, 512, 2048), (8, 32, 5, 2, 4, 40, 64), (4, 32, 5, 2, 4, 32, 128), (4, 128, 5, 2, 4, 32, 128), (8, 64, 5, 2, 4, 96, 128), (8, 128, 3, 1, 2, 8, 128)],
)
def test_gate_and_up_with_activation(unit, bits, group, rows, slots, experts, width, k):
    case = Case(bits, group, rows, slots, experts, 2 * width, k)
    offsets, sorted_rows, _, block_map = case.plan(unit[1])
    y = poison((case.total + 3, width + 8), np.uint16)
    case.launch(unit, f"silu_bf16_b{bits}_g{group}", y, width, block_map, sorted_rows)
    assert (y[case.total :] == 0xFFFF).all() and (y[:, width:] == 0xFFFF).all()
    expected = linear.grouped_gemm_silu(case.weights, case.x, offsets, sorted_rows, slots)
    assert_close(np.ascontiguousarray(y[: case.total, :width]), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_dequantise(bits, group):
    """P1's control, first half: the expanded matrix, whatever the grid."""
    packed = quant.random_matrix(np.random.default_rng(bits), (3, 5, 256), bits, group)
    for groups, threads in ((1, 32), (4, 64), (2, 256)):
        out = poison((3, 5, 256), np.uint16)
        run("dequantise", f"dequantise_b{bits}_g{group}", {**dict(enumerate(packed)), 3: out}, ("DequantiseArgs", {"rows": 15, "k": 256}), 4, (groups, 1, 1), (threads, 1, 1))
        np.testing.assert_array_equal(quant.to_f32(out), quant.expand(*packed, bits, group))


@pytest.mark.parametrize("unit", UNITS)
def test_expanded_weights_give_the_same_bytes(unit):
    """P1: in-tile dequantisation and its control, dequantise and a w16 product, multiply the same bf16 operands."""
    case = Case(4, 64, 21, 4, 9, 256, 256)
    _, sorted_rows, _, block_map = case.plan(unit[1])
    expanded = poison(case.weights.shape, np.uint16)
    run("dequantise", "dequantise_b4_g64", {**dict(enumerate(case.packed)), 3: expanded}, ("DequantiseArgs", {"rows": 9 * 256, "k": 256}), 4, (8, 1, 1), (256, 1, 1))
    for kernel, n in (("bf16", 256), ("silu_bf16", 128)):
        tiled, control = (poison((case.total, n), np.uint16) for _ in range(2))
        case.launch(unit, f"{kernel}_b4_g64", tiled, n, block_map, sorted_rows)
        case.launch(unit, f"{kernel}_w16", control, n, block_map, sorted_rows, expanded)
        np.testing.assert_array_equal(control, tiled)


@pytest.mark.parametrize("family, tile", [("grouped_gemm", 32), ("grouped_gemm_tensor", 32), ("grouped_gemm_tensor", 64), ("grouped_gemm_solo_tensor", 64)])
@pytest.mark.parametrize("rows, slots, experts", [(1, 4, 9), (50, 4, 9), (100, 2, 3)])
def test_two_lists_of_tiles_write_all_rows(family, tile, rows, slots, experts):
    """P3: large tiles and the tail list's small ones, each list its own launch, together are one grouped GEMM."""
    case = Case(4, 64, rows, slots, experts, 64, 128)
    max_tail = min(experts, case.total)
    offsets, sorted_rows, _, block_map, tail_map = moe.route_plan_split(case.ids, experts, tile, -(-case.total // tile) + max_tail, tile // 2, max_tail)
    y = poison((case.total, 64), np.uint16)
    case.launch((family, tile), "bf16_b4_g64", y, 64, block_map, sorted_rows)
    case.launch((family, tile // 2), "bf16_b4_g64", y, 64, tail_map, sorted_rows)
    assert_close(y, linear.grouped_gemm(case.weights, case.x, offsets, sorted_rows, slots))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("rows", [4096, 4097, 4098, 5001])
def test_case_32_prompts_of_many_rows_leave_no_row_unwritten_and_chunks_equal_the_whole(rows, unit):
    """Every routed row against the reference, and not one bit differs when the rows come in chunks of 1,024."""
    case = Case(4, 64, rows, 2, 17, 64, 64)
    offsets, sorted_rows, _, block_map = case.plan(unit[1])
    whole = poison((case.total, 64), np.uint16)
    case.launch(unit, "bf16_b4_g64", whole, 64, block_map, sorted_rows)
    assert_close(whole, linear.grouped_gemm(case.weights, case.x, offsets, sorted_rows, 2))
    by_choice, ids, x = np.empty_like(whole), case.ids, case.x
    by_choice[sorted_rows] = whole
    for start in range(0, rows, 1024):
        case.ids, case.x = ids[start : start + 1024], x[start : start + 1024].copy()
        case.total = case.ids.size
        _, sorted_rows, _, block_map = case.plan(unit[1])
        part, chunk = poison((case.total, 64), np.uint16), np.empty((case.total, 64), np.uint16)
        case.launch(unit, "bf16_b4_g64", part, 64, block_map, sorted_rows)
        chunk[sorted_rows] = part
        np.testing.assert_array_equal(chunk, by_choice[2 * start : 2 * start + case.total])


@pytest.mark.parametrize("rows", [1, 7, 64, 512])
def test_tensor_operations_agree_with_simdgroup_matrices(rows):
    """P6 on and off: gate and up of an expert layer in 64-row, 32-row and 16-row tiles against numpy, and against each other."""
    case, out = Case(4, 64, rows, 2, 8, 2 * 64, 128), {}
    for unit in UNITS:
        offsets, sorted_rows, _, block_map = case.plan(unit[1])
        out[unit] = poison((case.total, 64), np.uint16)
        case.launch(unit, "silu_bf16_b4_g64", out[unit], 64, block_map, sorted_rows)
        assert_close(out[unit], linear.grouped_gemm_silu(case.weights, case.x, offsets, sorted_rows, case.slots))
    for unit in UNITS[2:]:
        assert_close(out[unit], quant.to_f32(out["grouped_gemm", 16]))
        if device().kind == "cpu":  # there both units add in the same order
            np.testing.assert_array_equal(out[unit], out["grouped_gemm", 16])


@pytest.mark.slow
@pytest.mark.parametrize("family, tile", [("grouped_gemm", 32), ("grouped_gemm_tensor", 32), ("grouped_gemm_solo_tensor", 32)])
@pytest.mark.parametrize("kind", ["uneven", "one"])
@pytest.mark.parametrize("rows", [1, 7, 64, 512, 2048, 4096, 4097, 4098, 5001])
def test_all_experts_of_the_35b(family, tile, rows, kind):
    """256 experts, gate and up of the 35B (width 512, k 2,048): sampled rows, all columns, against float64."""
    width, k, experts, slots = 512, 2048, 256, 8
    rng = np.random.default_rng(rows)
    packed = quant.random_matrix(rng, (experts, 2 * width, k), 4, 64)
    ids, total = routing(rng, kind, rows, slots, experts), rows * slots
    offsets, sorted_rows, _, block_map = moe.route_plan(ids, experts, tile, -(-total // tile) + min(experts, total))
    x, y = bf16(rng.normal(0, 1, (rows, k))), poison((total, width), np.uint16)
    args = {"n": width, "k": k, "ldx": k, "ldy": width, "gather_slots": slots, "experts": experts}
    run(family, f"{family}_silu_bf16_b4_g64_m{tile}", {**dict(enumerate(packed)), 3: x, 4: y, 6: block_map, 7: sorted_rows},
        ("GroupedGemmArgs", args), 5, (width // 32, len(block_map), 1), (tile_threads(family), 1, 1))
    assert not (y == 0xFFFF).any()
    for row in rng.choice(total, min(total, 24), replace=False):
        expert = int(np.searchsorted(offsets, row, side="right")) - 1
        weights = quant.expand(*(part[expert] for part in packed), 4, 64)
        gate, up = np.split(linear.gemm(weights, x[sorted_rows[row] // slots][None]), 2, axis=1)
        assert_close(y[row][None], gate / (1 + np.exp(-gate)) * up)
