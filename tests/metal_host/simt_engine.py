"""The engine without the rest of the software Metal: compiled on its own and driven through ctypes.

build_engine() and build_kernels() need ziglang; tests that use them are skipped without it.
"""
from __future__ import annotations

import ctypes as C
import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HOST = ROOT / "src" / "metal_host"
BUFFERS = 31
FORWARD, REVERSE, RANDOM = 0, 1, 2


class Binding(C.Structure):
    _fields_ = [("address", C.c_void_p), ("length", C.c_uint64)]


class Constant(C.Structure):
    _fields_ = [("value", C.c_ubyte * 16), ("defined", C.c_uint32), ("reserved", C.c_uint32 * 3)]


class Dispatch(C.Structure):
    _fields_ = [("module", C.c_void_p), ("entry", C.c_uint32), ("groups", C.c_uint32 * 3), ("threads", C.c_uint32 * 3),
                ("grid", C.c_uint32 * 3), ("constants", C.POINTER(Constant)), ("threadgroup_bytes", C.c_uint32 * BUFFERS),
                ("buffers", Binding * BUFFERS)]


ACCESS_REPORT = C.CFUNCTYPE(None, C.c_void_p, C.c_uint32, C.c_uint32, C.c_uint64, C.c_uint64)


class Options(C.Structure):
    _fields_ = [("workers", C.c_uint32), ("order", C.c_uint32), ("strict", C.c_uint32), ("poison", C.c_uint32), ("seed", C.c_uint64),
                ("threadgroup_limit", C.c_uint32), ("reserved", C.c_uint32), ("report", ACCESS_REPORT), ("report_context", C.c_void_p)]


class Stats(C.Structure):
    _fields_ = [(n, C.c_uint64) for n in "threadgroups threads simd_operations barriers divergent threadgroup_peak".split()]


class Parameter(C.Structure):
    _fields_ = [("name", C.c_char_p)] + [(n, C.c_uint32) for n in "kind index space writable element_size element_align".split()]


class FunctionConstant(C.Structure):
    _fields_ = [("name", C.c_char_p), ("type", C.c_char_p), ("index", C.c_uint32), ("size", C.c_uint32), ("required", C.c_uint32)]


class Entry(C.Structure):
    _fields_ = [("name", C.c_char_p), ("function", C.c_void_p), ("max_threads", C.c_uint32), ("line", C.c_uint32),
                ("parameters", C.POINTER(Parameter)), ("parameter_count", C.c_uint32), ("reserved", C.c_uint32)]


class Description(C.Structure):
    _fields_ = [("abi", C.c_uint32), ("strict", C.c_uint32), ("source", C.c_char_p), ("entries", C.POINTER(Entry)), ("entry_count", C.c_uint32),
                ("constant_count", C.c_uint32), ("constants", C.POINTER(FunctionConstant)), ("table", C.c_void_p), ("records", C.c_void_p),
                ("records_end", C.c_void_p)]


@functools.cache
def folder() -> Path:
    holder = tempfile.TemporaryDirectory(prefix="lily-simt-")
    folder.holder = holder
    return Path(holder.name)


@functools.cache
def engine() -> C.CDLL:
    """Compiles src/metal_host/simt into a shared library of its own."""
    path = folder() / "engine.so"
    sources = [str(p) for p in sorted((HOST / "simt").glob("*.cpp"))]
    subprocess.run([sys.executable, "-m", "ziglang", "c++", "-target", "x86_64-linux-gnu.2.28", "-O2", "-std=c++20", "-fPIC", "-mno-red-zone",
                    "-fno-exceptions", "-shared", "-o", str(path), *sources, "-lpthread", "-lm", "-ldl"], check=True)
    library = C.CDLL(str(path))
    library.lily_simt_open.restype = C.c_void_p
    library.lily_simt_open.argtypes = [C.c_char_p, C.c_char_p, C.c_size_t]
    library.lily_simt_describe.restype = C.POINTER(Description)
    library.lily_simt_describe.argtypes = [C.c_void_p]
    library.lily_simt_find.argtypes = [C.c_void_p, C.c_char_p]
    library.lily_simt_static_threadgroup_bytes.argtypes = [C.c_void_p, C.c_uint32]
    library.lily_simt_run.argtypes = [C.POINTER(Dispatch), C.c_uint32, C.POINTER(Options), C.POINTER(Stats), C.c_char_p, C.c_size_t]
    library.lily_simt_cpu_has.argtypes = [C.c_char_p]
    return library


def best_target() -> str:
    return next(t for t in ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3") if engine().lily_simt_cpu_has(t.encode()))


def compile_metal(text: str, *extra: str, target: str = "x86-64-v3", name: str = "test.metal") -> tuple[int, str, Path]:
    """Runs the front end on `text`: exit status, messages, module."""
    count = len(list(folder().glob("*.metal")))
    source, module = folder() / f"{count}.metal", folder() / f"{count}.so"
    source.write_text(text)
    result = subprocess.run([sys.executable, str(HOST / "frontend" / "compile_text.py"), "--text", str(source), "--out", str(module), "--target", target,
                             "--name", name, *extra], capture_output=True, text=True)
    return result.returncode, result.stderr, module


class Failure(Exception):
    """The engine refused or stopped a dispatch."""


class Module:
    def __init__(self, path: Path):
        error = C.create_string_buffer(512)
        self.handle = engine().lily_simt_open(str(path).encode(), error, 512)
        if not self.handle:
            raise Failure(error.value.decode())
        self.description = engine().lily_simt_describe(self.handle).contents

    def find(self, name: str) -> int:
        return engine().lily_simt_find(self.handle, name.encode())

    def entry(self, name: str) -> Entry:
        return self.description.entries[self.find(name)]

    def static_bytes(self, name: str) -> int:
        return engine().lily_simt_static_threadgroup_bytes(self.handle, self.find(name))

    def constants(self, values: dict[int, object]):
        d = self.description
        block = (Constant * max(1, d.constant_count))()
        kinds = {b"uint": np.uint32, b"int": np.int32, b"float": np.float32, b"bool": np.uint8, b"ushort": np.uint16}
        for n in range(d.constant_count):
            c = d.constants[n]
            if c.index in values:
                raw = np.array(values[c.index], kinds[c.type]).tobytes()
                C.memmove(block[n].value, raw, len(raw))
                block[n].defined = 1
        return block

    def dispatch(self, name, buffers, groups, threads, grid=None, threadgroup=None, constants=None) -> Dispatch:
        """buffers: {index: array} (kept alive by the result) or a list."""
        if not isinstance(buffers, dict):
            buffers = dict(enumerate(buffers))
        d = Dispatch()
        d.keep = [np.ascontiguousarray(b) if not isinstance(b, np.ndarray) else b for b in buffers.values()]
        d.module, d.entry = self.handle, self.find(name)
        for index, array in zip(buffers, d.keep):
            d.buffers[index] = Binding(array.ctypes.data, array.nbytes)
        groups, threads = _three(groups), _three(threads)
        grid = _three(grid) if grid else [g * t for g, t in zip(groups, threads)]
        for k in range(3):
            d.groups[k], d.threads[k], d.grid[k] = groups[k], threads[k], grid[k]
        for index, size in (threadgroup or {}).items():
            d.threadgroup_bytes[index] = size
        d.block = self.constants(constants or {})
        d.constants = d.block
        return d

    def run(self, name, buffers, groups, threads, grid=None, threadgroup=None, constants=None, **options) -> Stats:
        return run([self.dispatch(name, buffers, groups, threads, grid, threadgroup, constants)], **options)


def run(dispatches, workers=0, order=FORWARD, strict=1, poison=1, seed=0, limit=0, report=None) -> Stats:
    array = (Dispatch * len(dispatches))(*dispatches)
    stats, error = Stats(), C.create_string_buffer(1024)
    options = Options(workers, order, strict, poison, seed, limit, 0, ACCESS_REPORT(report) if report else ACCESS_REPORT())
    if engine().lily_simt_run(array, len(dispatches), C.byref(options), C.byref(stats), error, 1024):
        raise Failure(error.value.decode())
    return stats


def _three(value) -> list[int]:
    value = [value] if isinstance(value, int) else list(value)
    return value + [1] * (3 - len(value))
