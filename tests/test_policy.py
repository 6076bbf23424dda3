"""Kernel selection at every edge of its table, with no device."""

from __future__ import annotations

import pytest

from lily import policy

T = policy.THRESHOLDS


@pytest.mark.parametrize("rows,gemv", [(1, True), (T.gemv_max_rows, True), (T.gemv_max_rows + 1, False), (4096, False)])
def test_few_rows_take_the_vector_kernel(rows: int, gemv: bool) -> None:
    assert policy.use_gemv("decode", rows) is gemv
    assert not policy.use_gemv("prefill", rows)


@pytest.mark.parametrize("rows,expected", [(1, 16), (383, 16), (384, 32), (4096, 32)])
def test_the_tile_follows_mean_rows_per_expert_of_the_35b(rows: int, expected: int) -> None:
    assert policy.expert_tile(rows, 8, 256, True) == expected


def test_the_control_of_p3_is_always_sixteen_rows() -> None:
    assert {policy.expert_tile(r, 8, 256, False) for r in (1, 512, 4096)} == {16}


@pytest.mark.parametrize("total,tile,experts,expected", [(9, 16, 257, 10), (36864, 32, 257, 1409), (0, 16, 4, 0)])
def test_the_block_map_bound_covers_a_partial_tile_per_expert(total: int, tile: int, experts: int, expected: int) -> None:
    assert policy.block_map_size(total, tile, experts) == expected


@pytest.mark.parametrize("context,fixed,blocks", [(1, True, 1), (256, True, 1), (257, True, 3), (4096, True, 32), (8192, True, 64), (32767, True, 64),
                                                  (32768, True, 128), (131072, True, 128), (32768, False, 64), (131072, False, 64)])
def test_attention_splits_from_its_threshold_on_and_takes_fixed_blocks_from_32k(context: int, fixed: bool, blocks: int) -> None:
    assert policy.attention_blocks(context, fixed) == blocks


@pytest.mark.parametrize("q,kv,enabled,pack", [(16, 2, True, 4), (8, 1, True, 4), (6, 2, True, 3), (4, 2, True, 2), (4, 4, True, 1), (10, 2, True, 1), (16, 2, False, 1)])
def test_packing_takes_the_largest_divisor_up_to_four(q: int, kv: int, enabled: bool, pack: int) -> None:
    assert policy.head_pack(q, kv, enabled) == pack


@pytest.mark.parametrize("dim,q,kv,holds", [(256, 16, 2, True), (256, 8, 1, True), (128, 16, 2, False), (256, 16, 4, False)])
def test_the_fixed_block_path_is_for_the_shape_it_was_measured_with(dim: int, q: int, kv: int, holds: bool) -> None:
    assert policy.fixed_block_shape(dim, q, kv) is holds


@pytest.mark.parametrize("rows,register,chunked,family", [(15, True, True, "gdn"), (16, True, True, "gdn_chunk"), (4096, True, False, "gdn"), (4096, False, True, "gdn_blockwise")])
def test_the_recurrence_is_chunked_from_one_full_chunk_on(rows: int, register: bool, chunked: bool, family: str) -> None:
    assert policy.scan_kernel(rows, register, chunked) == family


@pytest.mark.parametrize("keys,end", [(1, 256), (256, 256), (257, 512), (1025, 2048), (131072, 131072)])
def test_context_ranges_end_at_powers_of_two(keys: int, end: int) -> None:
    assert policy.context_range(keys) == end


@pytest.mark.parametrize("rows,requested,expected", [(5, None, 5), (5000, None, T.chunk_rows), (5000, 63, 63), (10, 63, 10)])
def test_chunks_are_the_policy_size_or_the_requested_one(rows: int, requested: int | None, expected: int) -> None:
    assert policy.chunk_size(rows, requested) == expected


def test_chunks_with_logits_are_bounded_by_bytes() -> None:
    assert policy.logits_chunk(4096, 248320, None) == T.logits_bytes // (4 * 248320)
    assert policy.logits_chunk(4096, 1 << 40, None) == 1


@pytest.mark.parametrize("start,length,message,turn,known,expected", [
    (0, 15, 0, 13, 0, [13]),                              # a short chat prompt: the end of the user turn
    (0, 15, 0, 15, 0, [14]),                              # no thought opened: an exact repeat still computes a token
    (13, 60, 40, 58, 13, [58]),                           # the next turn: nothing else is worth a pass
    (0, 900, 600, 898, 0, [600, 898]),                    # a long head before the last message
    (0, 900, 255, 898, 0, [898]),                         # one row short of being worth it
    (0, 900, 256, 898, 0, [256, 898]),
    (100, 900, 0, 898, 500, [500, 898]),                  # where an earlier prompt parted from this one
    (100, 900, 0, 898, 899, [898, 899]),
    (100, 900, 0, 898, 900, [898]),                       # known to the end: an exact repeat
    (0, 9000, 0, 8998, 0, [4096, 8192, 8998]),            # strides
    (4096, 9000, 0, 8998, 4096, [8192, 8998]),
    (0, 31, 0, 0, 0, []),                                 # text: too short
    (0, 32, 0, 0, 0, [31]),
    (0, 3000, 0, 0, 0, [2816, 2999]),                     # text: an aligned place before the end and the end itself
    (0, 4097, 0, 0, 0, [3840, 4096]),
    (2999, 3000, 0, 0, 3000, []),
])
def test_snapshot_positions(start: int, length: int, message: int, turn: int, known: int, expected: list[int]) -> None:
    assert policy.snapshot_positions(start, length, message, turn, known) == expected


M5, M1 = policy.Capabilities(tensor_ops=True), policy.Capabilities()
WIDE = policy.Capabilities(tuning=policy.Tuning(tile_rows=64), tensor_ops=True)


@pytest.mark.parametrize("enabled,device,family", [(True, M5, "gemm_tensor"), (True, M1, "gemm"), (False, M5, "gemm"), (False, M1, "gemm")])
def test_tensor_operations_need_the_switch_and_the_capability(enabled: bool, device: policy.Capabilities, family: str) -> None:
    assert policy.matrix_family("gemm", enabled, device) == family


def test_a_tuning_may_ask_for_tiles_of_one_simdgroup() -> None:
    solo = policy.Capabilities(tuning=policy.Tuning(solo_tiles=True), tensor_ops=True)
    assert policy.matrix_family("gemm", True, solo) == "gemm_solo_tensor" and policy.matrix_family("gemm", False, solo) == "gemm"


@pytest.mark.parametrize("enabled,device,rows", [(True, WIDE, 64), (False, WIDE, 32), (True, M5, 32), (True, policy.Capabilities(tuning=WIDE.tuning), 32)])
def test_large_tiles_come_from_the_tuning_of_devices_with_tensor_operations(enabled: bool, device: policy.Capabilities, rows: int) -> None:
    assert policy.largest_tile(enabled, device) == rows


@pytest.mark.parametrize("rows,expected", [(383, 16), (384, 32), (1279, 32), (1280, 64), (4096, 64)])
def test_the_tile_of_a_device_with_large_ones(rows: int, expected: int) -> None:
    assert policy.expert_tile(rows, 8, 256, True, 64) == expected
    assert policy.expert_tile(rows, 8, 256, False, 64) == 16


@pytest.mark.parametrize("rows,largest,expected", [(1, 64, 32), (32, 64, 32), (33, 64, 64), (4096, 64, 64), (4096, 32, 32)])
def test_the_tile_of_a_dense_product(rows: int, largest: int, expected: int) -> None:
    assert policy.gemm_tile(rows, largest) == expected


def test_apples_row_keeps_tiles_of_32_rows() -> None:
    assert policy.APPLE.tile_rows == 32 and {policy.TUNING[kind].tile_rows for kind in ("cpu", "cuda")} == {64}
