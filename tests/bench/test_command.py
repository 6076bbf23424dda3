"""`lily bench` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lily.cli import cli
from lily.errors import RequestError

TINY = ["bench", "--dims", "lily-tiny", "--layers-limit", "4", "--lengths", "16,24", "--rounds", "2", "--steps", "3"]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from lily.bench.limits import Limits, Probe

    monkeypatch.setattr(Probe, "limits", lambda self: Limits(1e9, 1e9, 1e10))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, [*TINY, *arguments])


def test_a_table_and_every_sample_as_json(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = run("--ablate", "gqa_packing,fused_chains", "--json", str(out))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert {(r["phase"], r["length"], r["variant"]) for r in found["rows"]} == {
        (p, n, v) for p in ("prefill", "decode") for n in (16, 24) for v in ("default", "gqa_packing=off", "fused_chains=off")}
    assert all(len(r["rates"]) == 2 and r["min"] <= r["median"] <= r["max"] for r in found["rows"])
    assert found["limits"]["copy"] == 1e9 and found["layers"] == 4
    assert result.output.count("tok/s") == 12 and "of the default" in result.output


def test_the_probe_shows_kernels(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    result = run("--probe", "--phase", "decode", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "sum of the kernels alone" in result.output and "moe" in result.output
    assert [k["length"] for k in json.loads(out.read_text())["kernels"]] == [16, 24]


@pytest.mark.parametrize("arguments, message", [
    (["--lengths", "16,x"], "list of numbers"), (["--lengths", "999999999"], "exceed the context"), (["--rounds", "0"], "at least 1"),
    (["--ablate", "nonsense"], "unknown option"), (["--dims", "nonsense"], "no preset"), (["--layers-limit", "0"], "layers must be at least 1"),
])
def test_wrong_arguments_are_refused_with_the_reason(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, RequestError) and message in str(result.exception)


def test_a_trained_model_is_not_cut() -> None:
    result = CliRunner().invoke(cli, ["bench", "--layers-limit", "2", "--lengths", "16"])
    assert isinstance(result.exception, RequestError) and "needs --dims" in str(result.exception)
