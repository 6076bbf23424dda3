"""The memory plan: default context and cache, refusals in numbers (case 38)."""

from __future__ import annotations

import dataclasses

import pytest

from lily.errors import DeviceError, RequestError
from lily.memory import GIB, MemoryPlan, checked_cache_bytes

M35 = MemoryPlan("GPU", 48 * GIB, 19 * GIB, GIB // 4, 190 << 20, 20480)  # the 35B on a 64 GB Mac


def test_the_default_context_is_the_models_where_it_fits_and_else_what_fits() -> None:
    assert M35.context(None, 262144, None) == 262144
    small = dataclasses.replace(M35, limit=20 * GIB)
    fits = small.context(None, 262144, None)
    assert small.needed(fits) <= small.limit < small.needed(fits + 1) and 20_000 < fits < 40_000
    assert small.context(8192, 262144, None) == 8192


@pytest.mark.parametrize("context,cache", [(262144, None), (1000, 8 * GIB)])
def test_case_38_only_what_was_asked_for_is_refused(context: int, cache: int | None) -> None:
    small = dataclasses.replace(M35, limit=20 * GIB)
    with pytest.raises(DeviceError, match=rf"context of {context} tokens needs .*weights 19\.00.*state.*scratch 0\.25.*offers 20\.00 GiB"):
        small.context(context, 262144, cache)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DeviceError, match=r"offers 16\.00 GiB"):
        dataclasses.replace(M35, limit=16 * GIB).context(None, 262144, None)


@pytest.mark.parametrize("context", [0, 1, True, 1.5, "8k", 262145])
def test_a_context_that_is_none_is_a_request_error(context: object) -> None:
    with pytest.raises(RequestError, match="262144"):
        M35.context(context, 262144, None)  # type: ignore[arg-type]


def test_the_default_cache_is_bounded_by_the_weights_and_by_what_is_left() -> None:
    assert M35.cache(None, 262144) == 19 * GIB // 4
    assert M35.cache(0, 262144) == 0 and M35.cache(123, 262144) == 123
    tight = dataclasses.replace(M35, limit=20 * GIB)
    assert 0 < tight.cache(None, 262144) < GIB
    assert dataclasses.replace(M35, limit=19 * GIB).cache(None, 262144) == 0
    tiny = MemoryPlan("GPU", 16 * GIB, 13 << 20, 60 << 20, 5 << 20, 2048)
    assert tiny.cache(None, 131072) == 256 << 20


@pytest.mark.parametrize("asked", [-1, True, 0.5, "1G"])
def test_cache_bytes_of_a_wrong_kind_are_refused(asked: object) -> None:
    with pytest.raises(RequestError, match="cache_bytes"):
        checked_cache_bytes(asked)
