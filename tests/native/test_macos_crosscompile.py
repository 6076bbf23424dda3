"""src/lily_native stays compilable for a Mac: cross-compiled with zig against our headers, linked against stubs.

The headers are the software Metal's, so this shows that the code is right for the platform (ABI, ARC, C++ library,
exported names), not that Apple's SDK agrees with our idea of it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "src" / "lily_native"
STUBS = Path(__file__).parent / "macos_stubs"
TARGET = ["-target", "aarch64-macos.14.0"]
MACH_O_64 = b"\xcf\xfa\xed\xfe"

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs ziglang")


def zig(*arguments: str) -> None:
    result = subprocess.run([sys.executable, "-m", "ziglang", "c++", *TARGET, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def compile_flags(folder: Path) -> list[str]:
    subprocess.run([sys.executable, NATIVE / "make_layouts.py", ROOT / "metal" / "common.h", folder / "layouts.inc"], check=True)
    includes = [folder, NATIVE, ROOT / "metal", ROOT / "src" / "metal_host" / "framework" / "include"]
    return ["-x", "objective-c++", "-std=c++17", "-fobjc-arc", "-fblocks", "-O1", *(f"-I{path}" for path in includes)]


def compile_all(folder: Path) -> list[str]:
    """Object files of everything but the bindings, which need Python's headers."""
    flags = compile_flags(folder)
    objects = []
    for source in sorted(NATIVE.glob("*.mm")):
        if source.name != "module.mm":
            output = folder / (source.stem + ".o")
            zig(*flags, "-Wall", "-Werror=nonnull", "-c", str(source), "-o", str(output))
            objects.append(str(output))
    return objects


def test_everything_compiles(tmp_path: Path) -> None:
    for path in compile_all(tmp_path):
        assert Path(path).read_bytes()[:4] == MACH_O_64


def test_the_bindings_compile(tmp_path: Path) -> None:
    nanobind = pytest.importorskip("nanobind")
    includes = [f"-I{nanobind.include_dir()}", f"-I{sysconfig.get_path('include')}"]
    zig(*compile_flags(tmp_path), *includes, "-c", str(NATIVE / "module.mm"), "-o", str(tmp_path / "module.o"))


@pytest.mark.skipif("LILY_TEST_MACOS_LINK" not in os.environ, reason="builds a C++ library for macOS first: set LILY_TEST_MACOS_LINK")
def test_everything_but_the_bindings_links(tmp_path: Path) -> None:
    library = tmp_path / "native.dylib"
    # dynamic_lookup for __isPlatformVersionAtLeast (of @available), which comes with Apple's compiler.
    stubs = [f"-F{STUBS}", f"-L{STUBS}", "-framework", "Metal", "-framework", "Foundation", "-lobjc"]
    zig("-shared", *compile_all(tmp_path), *stubs, "-Wl,-undefined,dynamic_lookup", "-o", str(library))
    assert library.read_bytes()[:4] == MACH_O_64
