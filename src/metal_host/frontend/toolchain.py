"""Driving the compiler: `python -m ziglang clang` preprocesses and compiles, zig's lld links."""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from entries import kernel_source, module_source
from errors import SourceError, ToolError
from lint import lint
from rewrite import Rewriter

HERE = Path(__file__).resolve().parent
STDLIB = HERE.parent / "stdlib"
SIMT = HERE.parent / "simt"

TARGETS = {
    "x86-64-v3": ["-march=x86-64-v3"],
    "x86-64-v4": ["-march=x86-64-v4"],
    "x86-64-v4-bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi", "-mavx512vbmi2"],
}
_LANGUAGE = ["-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-cl-single-precision-constant", "-target", "x86_64-linux-gnu"]
# Metal's rules: no value-changing optimisation, contraction inside one expression (Apple's default).
_MATH = ["-ffp-contract=on", "-fno-math-errno", "-Xclang", "-ffloat16-excess-precision=none"]
# Lanes run on 64 KiB stacks without a red zone. Lanes are fibers, not hardware lanes, so no function is convergent.
_CODE = ["-O3", "-fno-convergent-functions", "-fPIC", "-fvisibility=hidden", "-mno-red-zone", "-fno-stack-protector", "-fno-unwind-tables", "-fno-asynchronous-unwind-tables"]
# Full unrolling of loops of up to four turns only, before and after vectorisation: a loop over 8 or 16 independent elements stays
# a loop until it has become vector code, and what is left of it and the short loops around it then lie in registers. (For this
# reason the CPU ignores the source's unroll pragmas: rewrite.py.) Tests of `lane == 0` leave loops whatever the body's size (matrix.h).
_LOOPS = ["unroll-full-max-count=4", "unroll-runtime=false", "unroll-allow-partial=false", "unswitch-threshold=2000"]
_CODE += [word for option in _LOOPS for word in ("-mllvm", f"-{option}")]
# Errors and warnings only where they mean something in Metal.
_WARNINGS = ["-Werror=frame-larger-than=32768", "-Wframe-larger-than=32768", "-Wno-unknown-pragmas", "-Wno-c++20-extensions",
             "-Wno-c++17-extensions", "-Wno-pass-failed", "-Wno-duplicate-decl-specifier", "-Wno-unused-value", "-Wno-ignored-attributes",
             "-Wno-incompatible-function-pointer-types", "-Wno-gnu-anonymous-struct", "-Wno-nested-anon-types", "-ferror-limit=50"]
# Every load and store calls the engine (module.h), atomics, wide vectors and copies of structs included: the address
# sanitizer's outlined form, whose checks are ours. Kept scalar, so that each access is seen with its own size.
_OUTLINED = ["asan-instrumentation-with-call-threshold=0", "asan-kernel-mem-intrinsic-prefix=1", "asan-stack=0", "asan-globals=0", "asan-constructor-kind=none"]
_STRICT = ["-DLILY_STRICT=1", "-O1", "-fno-vectorize", "-fno-slp-vectorize", "-fsanitize=kernel-address",
           *(word for option in _OUTLINED for word in ("-mllvm", f"-{option}"))]


def _require_compiler() -> None:
    if importlib.util.find_spec("ziglang") is None:
        raise ToolError("the Python package ziglang is not installed, so Metal source cannot be compiled here")


def _run(arguments: list[str], text: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ziglang", *arguments]
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ToolError(f"cannot run {' '.join(command[:4])}: {error}") from error


def preprocess(text: str, file: str) -> str:
    """Macros expanded, comments gone, line markers kept. Metal's own headers are empty at this stage."""
    arguments = ["clang", "-E", "-x", "c++", "-std=c++17", "-nostdinc", "-undef", "-D__METAL_VERSION__=400", "-D__METAL__=1",
                 "-I", str(STDLIB / "names"), "-"]
    result = _run(arguments, text)
    if result.returncode:
        raise SourceError(_messages(result.stderr.replace("<stdin>", file), file))
    return result.stdout


def compile_text(text: str, file: str, out: Path, targets: dict[str, Path], strict: bool = False, keep: Path | None = None) -> None:
    """Compiles amalgamated Metal `text` (called `file` in messages) to one module per target.

    Raises SourceError for faults of the source. `out` is where temporary files go; each module is moved to its
    place when complete. `keep`: folder for the generated sources, for people who debug the front end.
    """
    _require_compiler()
    source = preprocess(text, file)
    faults = lint(source)
    rewriter = Rewriter(source)
    rewritten = rewriter.run()
    faults += [e for e in rewriter.errors if e not in faults]
    if faults:
        raise SourceError(faults)
    if not rewriter.entries:
        raise SourceError([f"{file}:1: error: no kernel in this file"])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".build-") as folder:
        work = Path(folder)
        (work / "kernel.clcpp").write_text(kernel_source(rewriter, rewritten))
        (work / "module.c").write_text(module_source(rewriter, file, strict))
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            for name in ("kernel.clcpp", "module.c"):
                (keep / f"{Path(file).stem}.{name}").write_text((work / name).read_text())
        _compile_module(work, strict, file)
        for target, path in targets.items():
            _compile_target(work, target, path, strict, file)


def compile_facts(source: str, file: str, out: Path) -> list[list[int]]:
    """Words of every entry's description (LILY_DESCRIBE): thread limit, then size | alignment << 24 of what each parameter
    points to. `source`: preprocessed Metal; only its declarations are compiled."""
    _require_compiler()
    rewriter = Rewriter(source)
    rewritten = rewriter.run()
    with tempfile.TemporaryDirectory(dir=out, prefix=".facts-") as folder:
        unit = Path(folder) / "facts.clcpp"
        unit.write_text(kernel_source(rewriter, rewritten, entries=False))
        result = _run(["clang", *_LANGUAGE, *_MATH, *_WARNINGS, "-O0", "-I", str(STDLIB), "-I", str(SIMT), "-S", str(unit), "-o", "-"])
    if result.returncode:
        raise SourceError(_messages(result.stderr, file))
    found: dict[int, list[int]] = {}
    words: list[int] | None = None
    for line in result.stdout.splitlines():
        if label := re.match(r"lily_facts_(\d+):", line):
            words = found[int(label[1])] = []
        elif words is not None and (value := re.match(r"\s*\.long\s+(\d+)", line)):
            words.append(int(value[1]))
        elif words is not None and (zeros := re.match(r"\s*\.zero\s+(\d+)", line)):
            words += [0] * (int(zeros[1]) // 4)
        elif not line.lstrip().startswith("#"):
            words = None
    return [found[n] for n in range(len(rewriter.entries))]


def _compile_module(work: Path, strict: bool, file: str) -> None:
    headers = Path(importlib.util.find_spec("ziglang").origin).parent / "lib" / "include"      # stdint.h, stddef.h
    arguments = ["clang", "-x", "c", "-std=c11", "-isystem", str(headers), "-target", "x86_64-linux-gnu", "-O2", "-fPIC", "-fvisibility=hidden", "-ffreestanding",
                 "-fno-builtin", "-mno-red-zone", "-fno-stack-protector", "-I", str(SIMT), "-I", str(STDLIB / "module"),
                 f"-DLILY_STRICT={int(strict)}", "-c", str(work / "module.c"), "-o", str(work / "module.o")]
    result = _run(arguments)
    if result.returncode:
        raise SourceError(_messages(result.stderr, file))


def _compile_target(work: Path, target: str, path: Path, strict: bool, file: str) -> None:
    if target not in TARGETS:
        raise ToolError(f"unknown target {target} (known: {', '.join(TARGETS)})")
    objects = work / "kernel.o"
    arguments = ["clang", *_LANGUAGE, *TARGETS[target], *_MATH, *_CODE, *_WARNINGS, *(_STRICT if strict else []),
                 "-I", str(STDLIB), "-I", str(SIMT), "-c", str(work / "kernel.clcpp"), "-o", str(objects)]
    result = _run(arguments)
    if result.returncode:
        raise SourceError(_messages(result.stderr, file))
    linked = work / "module.so"
    result = _run(["ld.lld", "-shared", "-o", str(linked), str(objects), str(work / "module.o"), "--no-undefined", "-z", "now",
                   "-z", "noexecstack", "-z", "nostart-stop-gc", "--strip-debug", "--gc-sections", "--build-id=none"])
    if result.returncode:
        raise SourceError([f"{file}:1: error: linking failed: {result.stderr.strip()}"])
    os.replace(linked, path)


# ------------------------------------------------------------------------------------ messages
_MESSAGE = re.compile(r"^(?P<file>[^:\n]+):(?P<line>\d+):(?:\d+:)? (?P<kind>error|fatal error|warning|note): (?P<text>.*)$")
_SPELLINGS = [
    ("__global_device", "device"), ("__global_host", "constant"), ("__constant", "constant"), ("__local", "threadgroup"), ("__private ", "thread "),
    ("__private", "thread"), ("__generic ", ""), ("opencl_global_device", "device"), ("opencl_global_host", "constant"),
]


def _messages(output: str, file: str) -> list[str]:
    """Errors of the compiler in Metal's words. One inside the library is reported where the source used it."""
    blocks: list[list[re.Match]] = []
    for line in output.splitlines():
        match = _MESSAGE.match(line)
        if not match:
            continue
        if match["kind"] in ("error", "fatal error", "warning") or not blocks:
            blocks.append([])
        blocks[-1].append(match)
    messages = []
    for block in blocks:
        head = block[0]
        if head["kind"] not in ("error", "fatal error"):
            continue
        place = next((m for m in block if not _is_library(m["file"])), None)
        where = f"{Path(place['file']).name}:{place['line']}" if place else f"{file}:1"
        text = head["text"]
        for theirs, metal in _SPELLINGS:
            text = text.replace(theirs, metal)
        messages.append(f"{where}: error: {text}")
    return messages or [f"{file}:1: error: {output.strip() or 'the compiler failed'}"]


def _is_library(file: str) -> bool:
    return str(STDLIB) in file or str(SIMT) in file or file.startswith("<")
