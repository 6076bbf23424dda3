"""Semantics of the software Metal's framework, from Objective-C++ (probe/metal_scenarios.mm)."""

from __future__ import annotations

import re

import pytest

from tests.metal_host.probing import run


def passed(scenario: str, settings: str = "") -> str:
    result = run(scenario, settings)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^live 0$", result.stdout, re.M), f"objects leaked: {result.stdout}"
    return result.stdout


@pytest.mark.parametrize("settings", ["", "strict=1", "order=reverse", "order=random,seed=5", "workers=1", "target=x86-64-v3"])
def test_one_command_buffer_with_everything(settings: str) -> None:
    passed("run_everything", settings)


@pytest.mark.parametrize("settings", ["", "order=reverse", "order=random,seed=3"])
def test_serial_encoder_keeps_the_order(settings: str) -> None:
    passed("serial_order", settings)


def test_tracked_buffers_are_ordered_and_untracked_ones_overlap() -> None:
    for settings in ("", "order=reverse", "order=random,seed=1"):
        assert "stale 0\n" in passed("tracked", settings)
    assert "stale 0\n" in passed("untracked")
    assert "stale 20\n" in passed("untracked", "order=reverse")
    assert "stale 0\n" not in passed("untracked", "order=random,seed=1")


def test_a_missing_barrier_shows_when_reordered() -> None:
    assert "wrong 0\n" in passed("missing_barrier", "workers=1")  # several workers may reorder by themselves
    assert "wrong 20\n" in passed("missing_barrier", "order=reverse")


def test_a_fault_is_the_error_of_its_command_buffer_only() -> None:
    output = passed("fault")
    assert "barrier" in output and "diverge" in output


def test_library_and_function_errors() -> None:
    output = passed("library_errors")
    assert "scale" in output and "index 0" in output
    assert "limit 1024" in output
    assert "limit 384" in passed("library_errors", "max_threads=384")


def test_no_copy_buffer() -> None:
    passed("no_copy")


MISTAKES = {
    "misaligned": "offset 2 is not a multiple of 4",
    "unbound": r"buffer 0 \(x\) is not bound",
    "too_many_threads": "128 threads per threadgroup, the pipeline's maxTotalThreadsPerThreadgroup is 64",
    "over_limit": "1025 threads",
    "index_31": "index 31",
    "offset_beyond": "offset 4096 is beyond",
    "long_bytes": "at most 4096",
    "written_bytes": "written by the kernel but was set with setBytes",
    "after_end": "after endEncoding",
    "left_open": "encoder was not ended",
    "two_encoders": "previous encoder was not ended",
    "commit_twice": "committed already",
    "wait_uncommitted": "wait for ever",
    "late_handler": "committed already",
    "no_pipeline": "no pipeline state",
    "empty_grid": "grid contains a 0",
    "threadgroup_unset": "threadgroup memory 0 has no length",
    "threadgroup_sum": "32784 bytes of threadgroup memory",
    "threadgroup_16": "multiple of 16",
    "blit_beyond": "beyond the buffer's 4096 bytes",
    "zero_buffer": "must not be 0",
    "no_copy_pointer": "not page-aligned",
}


@pytest.mark.parametrize("scenario", MISTAKES)
def test_what_the_validation_layer_rejects_aborts_with_one_line(scenario: str) -> None:
    result = run(scenario)
    assert result.returncode == -6, result.stdout + result.stderr  # SIGABRT
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("Metal: "), result.stderr
    assert re.search(MISTAKES[scenario], lines[0]), lines[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ("order=up", "order=up"),
        ("workers", "expected key=value"),
        ("speed=1", "unknown key speed"),
        ("max_threads=5000", "from 32 to 1024"),
        ("target=pdp11", "target=pdp11"),
    ],
)
def test_malformed_settings(settings: str, message: str) -> None:
    result = run("run_everything", settings)
    assert result.returncode == -6
    assert message in result.stderr
