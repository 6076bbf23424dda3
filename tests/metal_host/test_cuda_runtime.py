"""The CUDA device against a fake driver (fake_cuda.c): what is listed, errors, and the graphs that passes become. No GPU needed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .probing import zig_cxx

HERE = Path(__file__).parent
pytest.importorskip("lily._native")
pytestmark = [
    pytest.mark.skipif(sys.platform == "darwin", reason="the software Metal is not built on macOS"),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="compiles a stand-in for the driver, with ziglang"),
]


@cache
def fake_driver() -> Path:
    library = Path(tempfile.mkdtemp(prefix="lily-cuda-")) / "fake_cuda.so"
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.28"]
    assert zig_cxx()
    subprocess.run([*compiler, "-shared", "-fPIC", "-O1", "-w", str(HERE / "fake_cuda.c"), "-o", str(library)], check=True)
    return library


def run(scenario: str, tmp_path: Path, driver: str | None = None, nvrtc: str | None = None, **settings: object) -> tuple[Any, list[str]]:
    """The scenario's JSON and the lines of the driver's log."""
    log = tmp_path / "log"
    names = f"cuda_driver={driver or fake_driver()},nvrtc={nvrtc or fake_driver()}"
    environment = {**os.environ, "LILY_METAL_HOST": names, "FAKE_CUDA_LOG": str(log), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    child = subprocess.run([sys.executable, HERE / "cuda_runtime_child.py", scenario], env=environment, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), log.read_text().splitlines() if log.exists() else []


def edges(log: list[str]) -> list[tuple[str, list[int]]]:
    """(kernel, nodes that it waits for) of the graph's nodes, numbered from 1."""
    rows = [line.split(" after") for line in log if line.startswith("node")]
    return [(head.split()[2], [int(n) for n in tail.split()]) for head, tail in rows]


# ---------------------------------------------------------------------------------------------------------------- listing
def test_without_a_driver_the_device_is_not_listed_and_asking_for_it_says_why(tmp_path: Path) -> None:
    answer, _ = run("devices", tmp_path, driver="/nowhere/libcuda.so.1")
    assert len(answer["names"]) == 1 and answer["default"] == "cpu"
    assert "cannot be loaded" in answer["error"] and "install the NVIDIA driver" in answer["error"] and "present: cpu" in answer["error"]


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"devices": 0}, "sees no GPU"),
        ({"fail": "cuInit:100:0"}, "CUDA_ERROR_NO_DEVICE"),
        ({"capability": 7}, "compute capability 7.0, the kernels need 8.0"),
    ],
)
def test_a_machine_without_a_usable_gpu_says_why(tmp_path: Path, settings: dict[str, object], reason: str) -> None:
    answer, _ = run("devices", tmp_path, **settings)
    assert len(answer["names"]) == 1 and reason in answer["error"] and reason in answer["absent"][0][1]


def test_every_gpu_is_listed_after_the_cpu_which_stays_the_default(tmp_path: Path) -> None:
    answer, _ = run("devices", tmp_path, devices=2)
    assert answer["names"][0].startswith("CPU ") and answer["names"][1:] == ["CUDA Fake GPU 0", "CUDA Fake GPU 1"]
    assert answer["default"] == "cpu" and answer["absent"] == [] and answer["error"] == ""


def test_limits_come_from_the_driver_and_memory_is_not_unified(tmp_path: Path) -> None:
    answer, _ = run("facts", tmp_path)
    info = answer["info"]
    assert answer["kind"] == "cuda" and info["unified_memory"] is False and info["tensor_ops"] is True
    assert info["max_buffer_length"] == 4 << 30 and info["working_set"] == (3 << 30) - (512 << 20)
    assert (info["max_threads"], info["threadgroup_memory"], info["simd_width"]) == (1024, 32768, 32)


# ----------------------------------------------------------------------------------------------------------------- errors
def test_private_memory_cannot_be_viewed_and_running_out_of_it_is_an_error_of_that_device_only(tmp_path: Path) -> None:
    answer, _ = run("memory", tmp_path, fail="cuMemAlloc_v2:2:1")
    assert "private storage" in answer["view"]
    assert "out of memory for buffer second of 1048576 bytes" in answer["second"] and answer["cpu"] == ""


def test_a_gpu_without_a_context_gives_no_device(tmp_path: Path) -> None:
    assert "no command queue" in run("facts", tmp_path, fail="cuDevicePrimaryCtxRetain:2:0")[0]["failed"]


def test_a_sticky_error_fails_this_command_buffer_and_later_ones_and_leaves_the_cpu_alone(tmp_path: Path) -> None:
    answer, _ = run("sticky", tmp_path, fail="cuEventQuery:700:1")
    first, second, third = answer["cuda"]
    assert first == "" and "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access" in second
    assert "refuses further GPU work" in third or "SubmissionsIgnored" in third
    assert answer["cpu"] == 7


@pytest.mark.parametrize("function", ["cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags", "cuGraphLaunch"])
def test_an_error_while_launching_is_the_error_of_its_command_buffer(tmp_path: Path, function: str) -> None:
    answer, _ = run("launch_failure", tmp_path, fail=f"{function}:2:0")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in answer["first"] and "CUDA_ERROR_OUT_OF_MEMORY" in answer["second"]


def test_a_missing_or_failing_compiler_is_named(tmp_path: Path) -> None:
    assert "pip install 'lily-metal[cuda]'" in run("compiler", tmp_path, nvrtc="/nowhere/libnvrtc.so")[0]["error"]
    answer, _ = run("compiler", tmp_path, fail="nvrtcCompileProgram:6:0")
    assert "NVRTC_ERROR_COMPILATION" in answer["error"] and "kernel.cu(1): x" in answer["error"]
    assert "text" in answer["unknown"]


# ----------------------------------------------------------------------------------------------------------------- graphs
def test_the_levels_of_a_concurrent_pass_become_the_edges_of_a_graph(tmp_path: Path) -> None:
    _, log = run("levels", tmp_path)
    assert edges(log) == [("lily_silu_mul", after) for after in ([], [], [1, 2], [3], [3], [4, 5])]


def test_wide_levels_meet_in_an_empty_node(tmp_path: Path) -> None:
    _, log = run("wide", tmp_path)
    found = edges(log)
    assert [after for _, after in found[:5]] == [[]] * 5
    assert found[5] == ("empty", [1, 2, 3, 4, 5]) and [after for _, after in found[6:]] == [[6]] * 5


def test_a_serial_pass_is_a_chain(tmp_path: Path) -> None:
    _, log = run("serial", tmp_path)
    assert [after for _, after in edges(log)] == [[], [1], [2]]


def test_a_repeated_pass_is_launched_again_and_a_changed_one_takes_over_a_graph(tmp_path: Path) -> None:
    _, log = run("replay", tmp_path)
    assert log.count("launch") == 53
    assert log.count("instantiate") == 48  # of one shape; the other three passes update the oldest
    assert sum(line.startswith("update") for line in log) == 2 * 3


def test_threadgroups_that_are_no_multiple_of_32_run_the_ragged_variant(tmp_path: Path) -> None:
    _, log = run("ragged", tmp_path)
    compiled = [line for line in log if line.startswith("compile")]
    assert len(compiled) == 2 and "LILY_RAGGED" not in compiled[0] and compiled[1].endswith("-DLILY_RAGGED=1")
    assert "-arch=sm_90" in compiled[0] and "-DLILY_ENTRY_lily_silu_mul" in compiled[0]
    assert log[-1] == "single lily_silu_mul grid 1 1 1 block 40 1 1 shared 0"


def test_machine_code_is_kept_on_disk(tmp_path: Path) -> None:
    assert sum(line.startswith("compile") for line in run("levels", tmp_path)[1]) == 1
    assert sum(line.startswith("compile") for line in run("levels", tmp_path)[1]) == 1  # the log goes on; nothing was compiled again
    kept = list((tmp_path / "cache" / "lily" / "cuda").iterdir())
    assert [f.suffix for f in kept] == [".cubin"]
    kept[0].write_bytes(kept[0].read_bytes()[:-1])
    assert sum(line.startswith("compile") for line in run("levels", tmp_path)[1]) == 2


def test_a_generation_goes_its_whole_way_and_replays_one_graph_per_step(tmp_path: Path) -> None:
    answer, log = run("generate", tmp_path)
    assert answer["tokens"] == 20
    assert log.count("launch") >= 20 and log.count("instantiate") <= 4
