"""`lily doctor`: does this machine run every kernel, and run it right?

Compiles every kernel family as a library of its own at each language version, creates every pipeline, runs kernel
self-tests and the embedded goldens, and prints one page and a JSON. The first thing to run on a new Mac.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from . import selftest
from .errors import LilyError
from .gpu import TENSOR_VERSION, Gpu, language_version
from .model import Model
from .model_files import BUILT_IN

VERSIONS = ("3.1", "3.2", "4.0")


def families() -> list[str]:
    """Kernel families installed with the package."""
    folder = resources.files("lily") / "_kernels"
    return sorted(f.name.removesuffix(".metal") for f in folder.iterdir() if f.name.endswith(".metal"))


@dataclass
class Report:
    """Everything the doctor found; `problems` is empty on a healthy machine."""

    device: dict[str, Any]
    system: dict[str, str]
    path: str = ""
    libraries: list[dict[str, Any]] = field(default_factory=list)
    pipelines: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    goldens: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(self.__dict__, indent=2)

    def page(self) -> str:
        lines = [f"device      {self.device['name']}", f"system      {self.system['platform']}, Python {self.system['python']}",
                 f"matrix path {self.path}"]
        for version in VERSIONS:
            built = [x for x in self.libraries if x["version"] == version]
            good = sum(x["error"] is None for x in built)
            lines.append(f"MSL {version}     {good} of {len(built)} libraries compile")
        limits = sorted({p["max_threads"] for p in self.pipelines})
        lines.append(f"pipelines   {len(self.pipelines)} created, thread limits {', '.join(map(str, limits))}")
        lines += [f"self-test   {c['name']}: error {c['relative_rms']:.1e} (bound {c['bound']:.0e}) {'ok' if c['passed'] else 'FAILED'}" for c in self.checks]
        good = sum(g["passed"] for g in self.goldens)
        lines.append(f"goldens     {good} of {len(self.goldens)} conversations equal")
        lines += [f"PROBLEM     {p}" for p in self.problems]
        lines.append("all is well" if not self.problems else f"{len(self.problems)} problem(s)")
        return "\n".join(lines)


def matrix_path(gpu: Gpu) -> str:
    """Which unit multiplies matrix tiles (P6), and why."""
    return f"simdgroup matrices ({gpu.tensor_problem})" if gpu.tensor_problem else "tensor operations (checked against simdgroup matrices)"


def _libraries(gpu: Gpu, report: Report) -> None:
    supported = gpu.info.get("language_versions", list(VERSIONS))
    for version in VERSIONS:
        if version not in supported:
            continue
        for family in families():
            if language_version(family) > version or (language_version(family) == TENSOR_VERSION and not gpu.info["tensor_ops"]):
                continue
            error = None
            try:
                gpu.library(family, version)
            except LilyError as caught:
                error = str(caught)
                report.problems.append(f"library {family} at MSL {version}: {error}")
            report.libraries.append({"family": family, "version": version, "error": error})


def _pipelines(gpu: Gpu, report: Report) -> None:
    for family in families():
        if language_version(family) == TENSOR_VERSION and not gpu.info["tensor_ops"]:
            continue
        try:
            names = gpu.library(family).function_names
        except LilyError:
            continue  # reported with its library
        for name in names:
            try:
                pipeline = gpu.pipeline(family, name)
            except LilyError as caught:
                report.problems.append(f"pipeline {name}: {caught}")
                continue
            report.pipelines.append({"family": family, "function": name, "max_threads": pipeline.max_threads, "simd_width": pipeline.simd_width,
                                     "threadgroup_memory": pipeline.static_threadgroup_memory})
            if pipeline.simd_width != 32:
                report.problems.append(f"pipeline {name}: simdgroups of {pipeline.simd_width}, the kernels need 32")


def _goldens(report: Report, device: str | None) -> None:
    text = (resources.files("lily") / "data" / "doctor_goldens.json").read_text(encoding="utf-8")
    model = Model.load(BUILT_IN, device=device)
    for golden in json.loads(text):
        reply = model.generate(prompt_ids=golden["prompt_ids"], max_tokens=golden["max_tokens"], temperature=0)
        passed = list(reply.token_ids) == golden["greedy_ids"]
        report.goldens.append({"name": golden["name"], "passed": passed})
        if not passed:
            report.problems.append(f"golden {golden['name']}: got {list(reply.token_ids)}, expected {golden['greedy_ids']}")


def run(device: str | None = None) -> Report:
    """Examines a device and returns the report; raises DeviceError only when there is no device."""
    gpu = Gpu(device)
    report = Report(dict(gpu.info), {"platform": platform.platform(), "python": platform.python_version()}, matrix_path(gpu))
    if gpu.info["tensor_ops"] and gpu.tensor_problem:
        report.problems.append(gpu.tensor_problem)
    _libraries(gpu, report)
    _pipelines(gpu, report)
    try:
        report.checks = selftest.report(selftest.run_checks(gpu))
        report.problems += [f"self-test {c['name']}: relative error {c['relative_rms']:.2e} over {c['bound']:.0e}" for c in report.checks if not c["passed"]]
        _goldens(report, device)
    except LilyError as caught:
        report.problems.append(str(caught))
    return report
