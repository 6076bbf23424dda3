"""Builds tests/metal_host/probe against the software Metal's sources, and runs its scenarios in child processes."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOST = ROOT / "src" / "metal_host"
TARGET = ["-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64_v2"]
OBJC = ["-x", "objective-c++", "-std=c++17", "-fblocks", "-fobjc-runtime=macosx-10.15", "-I", str(HOST / "framework" / "include")]


def zig_cxx() -> list[str]:
    if sys.platform == "darwin":
        pytest.skip("the software Metal is not built on macOS")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs ziglang")
    return [sys.executable, "-m", "ziglang", "c++"]


def compile_one(source: Path, folder: Path, *flags: str) -> str:
    """Object file of one source; zig keeps it in its own cache, so a second run takes no time."""
    output = folder / (source.name + ".o")
    subprocess.run([*zig_cxx(), *TARGET, *flags, "-O1", "-fPIC", "-c", str(source), "-o", str(output)], check=True)
    return str(output)


@functools.cache
def probe() -> Path:
    """Path of the probe program, beside a `_metal_host` folder so that it can compile kernels."""
    folder = Path(tempfile.mkdtemp(prefix="lily-probe-"))
    (folder / "_metal_host").symlink_to(HOST)
    objects = []
    for source in sorted((HOST / "objc").glob("*.cpp")):
        objects.append(compile_one(source, folder, "-std=c++17"))
    for source in sorted((HOST / "simt").glob("*.cpp")):
        objects.append(compile_one(source, folder, "-std=c++17", "-mno-red-zone"))
    for source in sorted((HOST / "cuda").glob("*.cpp")):
        objects.append(compile_one(source, folder, "-std=c++17"))
    for source in [*sorted((HOST / "framework").glob("*.mm")), *sorted((HOST / "cuda").glob("*.mm")), *sorted((Path(__file__).parent / "probe").glob("*.mm"))]:
        arc = "-fno-objc-arc" if source.name == "NSObject.mm" else "-fobjc-arc"
        objects.append(compile_one(source, folder, *OBJC, arc, "-Wno-deprecated-objc-isa-usage"))
    program = folder / "probe"
    subprocess.run([*zig_cxx(), *TARGET, *objects, "-o", str(program), "-ldl", "-lpthread"], check=True)
    return program


def run(scenario: str, settings: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # its python3 has ziglang
    environment = {**os.environ, "LILY_METAL_HOST": settings, "PATH": path}
    return subprocess.run([probe(), scenario], env=environment, capture_output=True, text=True, timeout=300)
