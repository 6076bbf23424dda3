"""`lily doctor` finds a healthy machine healthy and a sick one sick."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from lily import doctor, policy, selftest
from lily import gpu as gpu_module
from lily.gpu import Gpu


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.run()


def test_this_machine_is_well(report: doctor.Report) -> None:
    assert report.problems == []
    assert {x["family"] for x in report.libraries} == set(doctor.families())
    assert {x["version"] for x in report.libraries} >= {"3.1"}
    assert all(p["max_threads"] >= 32 and p["simd_width"] == 32 and p["threadgroup_memory"] <= 32768 for p in report.pipelines)
    assert {p["function"] for p in report.pipelines} >= {"gemv_bf16_b4_g64", "gdn_step_d128", "attn_prefill", "finish"}
    assert all(c["passed"] for c in report.checks) and len(report.goldens) == 10


def test_the_page_and_the_json_say_the_same(report: doctor.Report) -> None:
    assert "all is well" in report.page() and report.device["name"] in report.page()
    assert json.loads(report.to_json())["problems"] == []


def test_a_wrong_kernel_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selftest.CHECKS, "rmsnorm", (lambda gpu, rng: float("nan"), 1e-3))
    monkeypatch.setattr(doctor, "_libraries", lambda gpu, report: None)
    monkeypatch.setattr(doctor, "_pipelines", lambda gpu, report: None)
    monkeypatch.setattr(doctor, "_goldens", lambda report, device: None)
    assert any("rmsnorm" in p for p in doctor.run().problems)


def test_a_wrong_golden_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from lily.session import Sampled, Session

    def wrong(self: Any, ids: Any, *rest: Any) -> Any:
        yield Sampled(7, True)

    monkeypatch.setattr(Session, "generate", wrong)
    report = doctor.Report({}, {})
    doctor._goldens(report, None)
    assert len(report.problems) == len(report.goldens) == 10


def test_self_tests_see_unwritten_outputs() -> None:
    assert not selftest.Check("x", selftest._relative(np.array([np.nan]), np.array([1.0])), 1.0).passed


def test_the_command_succeeds_and_saves_its_json(tmp_path: Any) -> None:
    out = tmp_path / "doctor.json"
    result = subprocess.run([sys.executable, "-m", "lily", "doctor", "--save", str(out)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(out.read_text())["problems"] == [] and len(result.stdout.splitlines()) < 40


def test_tensor_operations_that_disagree_are_off_and_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a wrong result on the new unit leaves the simdgroup matrices in use, and the doctor says so."""
    right = selftest._grouped_product

    def wrong(gpu: Any, rng: Any, family: str, tile: int) -> Any:
        out = right(gpu, rng, family, tile)
        return out * 1.02 if family.endswith("_tensor") else out

    monkeypatch.setattr(selftest, "_grouped_product", wrong)
    for name in ("_libraries", "_pipelines"):
        monkeypatch.setattr(doctor, name, lambda gpu, report: None)
    monkeypatch.setattr(doctor, "_goldens", lambda report, device: None)
    assert not Gpu().capabilities.tensor_ops
    report = doctor.run()
    assert report.path.startswith("simdgroup matrices (tensor operations disagree")
    family = policy.tensor_family("grouped_gemm", policy.TUNING[Gpu().kind])
    assert any(f"{family}_m16 by 2.0e-02, {family}_m32 by" in p for p in report.problems)


def test_tensor_operations_that_do_not_compile_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpu_module.kernel_source
    monkeypatch.setattr(gpu_module, "kernel_source", lambda family: "#include <nothing>\n" if family.startswith("gemm_") else real(family))
    gpu = Gpu()
    assert not gpu.capabilities.tensor_ops and gpu.tensor_problem.startswith("tensor operations failed: ")


def test_tensor_operations_are_in_use_where_they_pass() -> None:
    gpu = Gpu()
    assert gpu.capabilities.tensor_ops is bool(gpu.info["tensor_ops"])
