"""The Metal front end: what Metal accepts compiles, what it refuses is refused at the right line."""
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import simt_engine as simt

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed: Metal source cannot be compiled here")
FRONTEND = simt.HOST / "frontend"
LINT = Path(__file__).parent / "lint"
RIGHT = ["ok", "ok_language", "shuffle_vec3ok", "struct_copy_device", "struct_copy_constant"]
WRONG = {  # file: (line, part of the message)
    "atomic_nonatomic": (9, "atomic_fetch_add_explicit"), "atomic_wrong_as": (9, "atomic_store_explicit"), "const_write": (9, "not assignable"),
    "device_to_tg": (9, "ft"), "device_to_thread": (9, "fth"), "double": (9, "double"), "float_to_bfloat": (9, "="),
    "float_to_bfloat_var": (9, "bfloat"), "global_var": (3, "program-scope variable"), "goto": (9, "goto"), "half_bfloat_mix": (9, "deleted operator"),
    "int_to_bfloat": (5, "deleted"), "local_pointer": (5, "address space"), "new": (9, "dynamic memory"), "static_local": (4, "static local"),
    "ternary_mixed": (9, "incompatible operand types"), "tg_in_helper": (3, "outside a kernel"), "tg_initialiser": (4, "initialiser"),
    "tg_ptr_member": (4, "no matching constructor"), "tg_to_thread": (9, "fth"), "throw": (9, "exceptions"), "undeclared": (9, "foo"),
    "unqualified_ptr": (3, "address space"), "virtual": (3, "virtual"), "write_constant": (9, "cannot assign"),
}


def test_every_lint_file_is_listed():
    assert {p.stem for p in LINT.glob("*.metal")} == set(RIGHT) | set(WRONG)


@needs_compiler
@pytest.mark.parametrize("name", RIGHT)
def test_right_source_compiles(name):
    status, messages, module = simt.compile_metal((LINT / f"{name}.metal").read_text(), name=f"{name}.metal")
    assert (status, messages) == (0, "")
    assert module.is_file()


@needs_compiler
@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_source_is_refused_at_its_line(name):
    line, part = WRONG[name]
    status, messages, module = simt.compile_metal((LINT / f"{name}.metal").read_text(), name=f"{name}.metal")
    assert status == 1
    first = messages.splitlines()[0]
    assert first.startswith(f"{name}.metal:{line}: error: ") and part in first
    assert not module.exists()


@needs_compiler
def test_messages_use_the_words_of_metal():
    _, messages, _ = simt.compile_metal((LINT / "ternary_mixed.metal").read_text(), name="t.metal")
    assert "'device float *' and 'threadgroup float *'" in messages
    assert "__" not in messages


@needs_compiler
def test_error_in_an_included_file_names_that_file(tmp_path):
    metal = tmp_path / "metal"
    metal.mkdir()
    (metal / "helper.h").write_text("#pragma once\n#include <metal_stdlib>\nusing namespace metal;\n\nMETAL_FUNC float twice(float x) { return y; }\n")
    (metal / "k.metal").write_text('#include "helper.h"\n#include "helper.h"\nkernel void k(device float* a [[buffer(0)]]) { a[0] = twice(a[0]); }\n')
    result = _build(metal, tmp_path / "out")
    assert result.returncode == 1
    assert "helper.h:5: error: use of undeclared identifier 'y'" in result.stderr


@needs_compiler
def test_build_writes_text_and_modules_and_nothing_else(tmp_path):
    metal = tmp_path / "metal"
    metal.mkdir()
    (metal / "k.metal").write_text("#include <metal_stdlib>\nusing namespace metal;\nkernel void k(device float* a [[buffer(0)]]) { a[0] = 1; }\n")
    result = _build(metal, tmp_path / "out", "x86-64-v3,x86-64-v4")
    assert (result.returncode, result.stderr) == (0, "")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    key = names[0].split(".")[0]
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert names == [f"{key}.cu", f"{key}.cuda.json", f"{key}.x86-64-v3.so", f"{key}.x86-64-v4.so", "k.metal"]


def test_amalgamation_needs_no_compiler(tmp_path):
    metal = tmp_path / "metal"
    metal.mkdir()
    (metal / "a.h").write_text("#pragma once\nint f();\n")
    (metal / "k.metal").write_text('#include <metal_stdlib>\n#include "a.h"\nint g();\n#include "a.h"\nint h();\n')
    code = f"import sys; sys.path.insert(0, {str(FRONTEND)!r}); import amalgamate, pathlib; print(amalgamate.amalgamate(pathlib.Path({str(metal / 'k.metal')!r})))"
    text = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert text.count("int f();") == 1
    lines = text.splitlines()
    assert lines[0] == '#line 1 "k.metal"'
    assert lines[lines.index("int h();") - 1] == '#line 5 "k.metal"'


@needs_compiler
def test_module_describes_its_kernels():
    status, messages, path = simt.compile_metal((LINT / "ok_language.metal").read_text(), name="ok_language.metal")
    assert status == 0, messages
    module = simt.Module(path)
    description = module.description
    assert description.source == b"ok_language.metal"
    assert [description.entries[i].name for i in range(description.entry_count)] == [b"k_bf16", b"k_f32"]
    entry = module.entry("k_bf16")
    assert entry.max_threads == 64
    rows = [(p.name, p.kind, p.index, p.space, p.writable, p.element_size, p.element_align) for p in (entry.parameters[i] for i in range(entry.parameter_count))]
    assert rows == [(b"in", 0, 0, 0, 0, 4, 4), (b"out", 0, 1, 0, 1, 2, 2), (b"args", 0, 2, 1, 0, 8, 4), (b"scratch", 1, 0, 2, 0, 16, 16)]
    constants = [(c.name, c.type, c.index, c.size, c.required) for c in (description.constants[i] for i in range(description.constant_count))]
    assert constants == [(b"N", b"uint", 0, 4, 1), (b"FAST", b"bool", 1, 1, 0)]
    assert module.static_bytes("k_bf16") == 4 * 8 * 2 + 16
    assert module.static_bytes("k_f32") == 2 * 8 * 4 + 16


@needs_compiler
def test_modules_need_no_library():
    _, _, path = simt.compile_metal((LINT / "ok.metal").read_text())
    data = path.read_bytes()
    assert b"GLIBC" not in data and b"libc" not in data and b"libm" not in data


def _build(metal: Path, out: Path, targets: str = "x86-64-v3") -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(FRONTEND / "build_kernels.py"), "--metal", str(metal), "--out", str(out), "--targets", targets],
                          capture_output=True, text=True)
