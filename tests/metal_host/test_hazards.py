"""The hazard recorder: exact byte ranges of every kind of access, and conflicts between dispatches that nothing orders."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import simt_engine as simt

pytestmark = [
    pytest.mark.skipif(sys.platform == "darwin", reason="the software Metal is not built on macOS"),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="instrumented kernels are compiled at run time, with ziglang"),
]

# ---------------------------------------------------------------------------------------------------- the engine
SOURCE = """
#include <metal_stdlib>
using namespace metal;
struct Row { float v[12]; };
struct Small { uchar a; ushort b; };
kernel void strided(device const float* x [[buffer(0)]], device float* o [[buffer(1)]], uint i [[thread_position_in_grid]]) { o[2 * i] = x[i] + x[i + 1]; }
kernel void narrow(device const uchar* x [[buffer(0)]], device half* o [[buffer(1)]], uint i [[thread_position_in_grid]]) { o[3 * i] = half(x[2 * i]); }
kernel void wide(device const uint4* x [[buffer(0)]], device float3* o [[buffer(1)]], uint i [[thread_position_in_grid]]) { o[i].xy = float2(as_type<float4>(x[2 * i]).xy); }
kernel void packed(device const packed_float3* x [[buffer(0)]], device packed_float3* o [[buffer(1)]], uint i [[thread_position_in_grid]]) { if (i > 0) o[i] = x[i]; }
kernel void structs(device const Row* x [[buffer(0)]], device Row* o [[buffer(1)]], uint i [[thread_position_in_grid]]) { if (i % 2 == 0) o[i] = x[i + 1]; }
kernel void added(device atomic_uint* o [[buffer(1)]], uint i [[thread_position_in_grid]]) { atomic_fetch_add_explicit(o + 4 * (i % 2), i, memory_order_relaxed); }
kernel void exchanged(device atomic_uint* o [[buffer(1)]]) {
  uint expected = 7;
  atomic_compare_exchange_weak_explicit(o + 1, &expected, 9u, memory_order_relaxed, memory_order_relaxed);
}
kernel void matrix(device const float* x [[buffer(0)]], device float* o [[buffer(1)]]) {
  simdgroup_float8x8 m;
  simdgroup_load(m, x, 12);
  simdgroup_store(m, o, 16);
}
kernel void half_matrix(device const half* x [[buffer(0)]], device half* o [[buffer(1)]]) {
  simdgroup_half8x8 m;
  simdgroup_load(m, x, 11);
  simdgroup_store(m, o, 9);
}
kernel void wild(device const float* x [[buffer(0)]], device float* o [[buffer(1)]]) { o[3] = x[5]; o[1 << 20] = 1; }
"""
Ranges = list[tuple[int, int]]


@cache
def module() -> Any:
    status, messages, path = simt.compile_metal(SOURCE, "--strict", name="hazards.metal")
    assert status == 0, messages
    return simt.Module(path)


def record(*kernels: str, workers: int = 0) -> dict[tuple[int, str], Ranges]:
    """Runs the kernels side by side on 32 threads each: byte ranges by (dispatch, "read x" or "write o")."""
    arrays = [(np.zeros(1024, np.float32), np.zeros(1024, np.float32)) for _ in kernels]
    spans = [(a.ctypes.data, a.nbytes, f"{n}", name) for n, pair in enumerate(arrays) for a, name in zip(pair, "xo", strict=True)]
    seen: dict[tuple[int, str], Ranges] = {}

    def report(_: Any, dispatch: int, store: int, start: int, end: int) -> None:
        base, _, owner, name = next(s for s in spans if s[0] <= start and end <= s[0] + s[1])
        assert owner == str(dispatch)
        seen.setdefault((dispatch, f"{'write' if store else 'read'} {name}"), []).append((start - base, end - base))

    dispatches = [module().dispatch(k, dict(enumerate(pair)), 1, 32) for k, pair in zip(kernels, arrays, strict=True)]
    simt.run(dispatches, workers=workers, report=report)
    return seen


def each(count: int, step: int, size: int, first: int = 0) -> Ranges:
    return [(first + step * i, first + step * i + size) for i in range(count)]


EXPECTED: dict[str, dict[str, Ranges]] = {
    "strided": {"read x": [(0, 132)], "write o": each(32, 8, 4)},
    "narrow": {"read x": each(32, 2, 1), "write o": each(32, 6, 2)},
    "packed": {"read x": [(12, 384)], "write o": [(12, 384)]},
    "structs": {"read x": each(16, 96, 48, 48), "write o": each(16, 96, 48)},
    "added": {"read o": [(0, 4), (16, 20)], "write o": [(0, 4), (16, 20)]},
    "exchanged": {"write o": [(4, 8)]},
    "matrix": {"read x": each(8, 48, 32), "write o": each(8, 64, 32)},
    "half_matrix": {"read x": each(8, 22, 16), "write o": each(8, 18, 16)},
}


@pytest.mark.parametrize("kernel", EXPECTED)
def test_ranges_are_exact(kernel: str) -> None:
    for workers in (0, 1):
        seen = record(kernel, workers=workers)
        for what, ranges in EXPECTED[kernel].items():
            assert seen.pop((0, what)) == ranges
        assert not seen or kernel == "exchanged"  # whether the exchange also counts as a read does not matter


def test_a_vector_access_is_at_least_what_the_source_names() -> None:
    seen = record("wide")
    assert all(any(s <= 32 * i and 32 * i + 8 <= e for s, e in seen[0, "read x"]) for i in range(32))
    assert all(any(s <= 16 * i and 16 * i + 8 <= e for s, e in seen[0, "write o"]) for i in range(32))


def test_dispatches_of_one_run_are_told_apart() -> None:
    seen = record("strided", "narrow", "strided")
    assert {n for n, _ in seen} == {0, 1, 2}
    assert seen[0, "write o"] == seen[2, "write o"] == EXPECTED["strided"]["write o"]
    assert seen[1, "write o"] == EXPECTED["narrow"]["write o"]


def test_a_failed_run_reports_what_it_did() -> None:
    x, o = np.zeros(1024, np.float32), np.zeros(1024, np.float32)
    seen: list[tuple[int, int]] = []
    with pytest.raises(simt.Failure, match="outside every bound buffer"):
        simt.run([module().dispatch("wild", [x, o], 1, 32)], report=lambda _, dispatch, store, start, end: seen.append((store, end - start)))
    assert seen == [(0, 4), (1, 4)]


# ---------------------------------------------------------------------------------------------- the software Metal
def child(settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(Path(__file__).with_name("hazard_cases.py"))], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "LILY_METAL_HOST": settings})


@pytest.fixture(scope="module", params=["", ",workers=1", ",order=reverse", ",order=random,seed=4"])
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    run = child("strict=2,hazards=on" + request.param)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)  # type: ignore[no-any-return]


CONFLICTS = {
    "read after write": "produce (dispatch 0) writes and consume (dispatch 1) reads bytes 0 to 128 of buffer 'shared' (read after write)",
    "write after read": "consume (dispatch 0) reads and produce (dispatch 1) writes bytes 0 to 128 of buffer 'shared' (write after read)",
    "write after write": "produce (dispatch 0) writes and consume (dispatch 1) writes bytes 0 to 128 of buffer 'shared' (write after write)",
    "in part": "produce (dispatch 0) writes and consume (dispatch 1) reads bytes 128 to 192 of buffer 'shared' (read after write)",
    "atomics": "bytes 0 to 4 of buffer 'shared'",
    "atomic load": "count (dispatch 0) writes and look (dispatch 1) reads bytes 0 to 4 of buffer 'shared' (read after write)",
}
CLEAN = ("both read", "side by side", "interleaved")


@pytest.mark.parametrize("case", CONFLICTS)
def test_a_conflict_fails_the_command_buffer_and_a_barrier_cures_it(results: dict[str, Any], case: str) -> None:
    assert "hazard: " in results[case]["bare"]["error"] and CONFLICTS[case] in results[case]["bare"]["error"]
    assert results[case]["barrier"]["error"] == results[case]["serial"]["error"] == ""


@pytest.mark.parametrize("case", CLEAN)
def test_accesses_that_do_not_meet_are_no_conflict(results: dict[str, Any], case: str) -> None:
    assert {run["error"] for run in results[case].values()} == {""}


def test_what_was_recorded_is_readable(results: dict[str, Any]) -> None:
    for run in results["read after write"].values():
        assert run["accesses"] == [[0, "produce", "shared", "w", 0, 128], [1, "consume", "shared", "r", 0, 128], [1, "consume", "other", "w", 0, 128]]
    assert [a[:4] for a in results["interleaved"]["bare"]["accesses"]] == [[0, "even", "shared", "w"]] * 32 + [[1, "odd", "shared", "w"]] * 32


def test_without_the_setting_nothing_is_recorded() -> None:
    run = child("strict=2")
    assert run.returncode == 0, run.stderr
    assert {(r["error"], r["accesses"]) for case in json.loads(run.stdout).values() for r in case.values()} == {("", None)}


@pytest.mark.parametrize("settings, message", [("hazards=on", "add strict=2"), ("strict=1,hazards=on", "add strict=2"), ("strict=2,hazards=1", "expected on or off")])
def test_malformed_settings_abort_with_one_line(settings: str, message: str) -> None:
    run = child(settings)
    assert run.returncode == -6
    assert message in run.stderr and run.stderr.startswith("Metal: LILY_METAL_HOST:")
