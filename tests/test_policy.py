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


@pytest.mark.parametrize("context,blocks", [(1, 1), (1024, 1), (1025, 3), (32768, 64), (131072, 64)])
def test_attention_splits_over_blocks_from_its_threshold_on(context: int, blocks: int) -> None:
    assert policy.attention_blocks(context) == blocks


@pytest.mark.parametrize("keys,end", [(1, 1024), (1024, 1024), (1025, 2048), (131072, 131072)])
def test_context_ranges_end_at_powers_of_two(keys: int, end: int) -> None:
    assert policy.context_range(keys) == end


@pytest.mark.parametrize("rows,requested,expected", [(5, None, 5), (5000, None, T.chunk_rows), (5000, 63, 63), (10, 63, 10)])
def test_chunks_are_the_policy_size_or_the_requested_one(rows: int, requested: int | None, expected: int) -> None:
    assert policy.chunk_size(rows, requested) == expected


def test_chunks_with_logits_are_bounded_by_bytes() -> None:
    assert policy.logits_chunk(4096, 248320, None) == T.logits_bytes // (4 * 248320)
    assert policy.logits_chunk(4096, 1 << 40, None) == 1
