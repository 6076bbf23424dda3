"""The GPU as the engine uses it: one device, its pipelines, its buffers and recorded programs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np

from . import _native, selftest
from .errors import DeviceError
from .kernel_args import structs
from .policy import APPLE, TUNING, Capabilities
from .schedule import Dispatch, barriers

LANGUAGE_VERSION = "3.1"  # the floor of Metal Shading Language
TENSOR_VERSION = "4.0"  # families of kernels on tensor operations (P6), which the name ends in `_tensor`

# Rough rates that turn bytes and multiply-accumulates into a first cost estimate; the native side corrects the scale
# from the measured times of the last command buffers, so only the proportions matter.
_BYTES_PER_NS = 100.0
_MACS_PER_NS = 2000.0
_LAUNCH_NS = 4000.0

_STAGING_BYTES = 4 << 20  # the window through which the CPU sees memory that is not its own


def device_kind(name: str) -> str:
    """"metal" for an Apple GPU, else the first word of the device's name in lower case ("cpu", "cuda")."""
    first = name.split()[0].lower()
    return "metal" if first == "apple" else first


def language_version(family: str) -> str:
    """The Metal Shading Language version that a kernel family is compiled as."""
    return TENSOR_VERSION if family.endswith("_tensor") else LANGUAGE_VERSION


def kernel_source(family: str) -> str:
    """Amalgamated Metal text of a kernel family as installed."""
    return (resources.files("lily") / "_kernels" / f"{family}.metal").read_text(encoding="utf-8")


class Gpu:
    """One device. `kind`: None for the system's default device, "metal", "cpu" or "cuda".

    Raises DeviceError when no such device is present, naming those that are.
    """

    def __init__(self, kind: str | None = None) -> None:
        found = _native.devices()
        if not found:
            raise DeviceError("no GPU device is present", fix="on a Mac, run in a session with access to the GPU (not over a bare SSH login or in a virtual machine)")
        if kind is None:
            chosen = found[0]
        else:
            matching = [d for d in found if device_kind(d["name"]) == kind]
            if not matching:
                names = ", ".join(f"{device_kind(d['name'])} ({d['name']})" for d in found)
                reason = dict(_native.absent_devices()).get(kind)
                raise DeviceError(f"no device of kind {kind!r}" + (f": {reason}" if reason else ""), fix=f"present: {names}")
            chosen = matching[0]
        self.native = _native.Device(chosen["index"])
        self.name: str = chosen["name"]
        self.kind = device_kind(self.name)
        self.info: dict[str, Any] = self.native.info()
        self._libraries: dict[tuple[str, str], Any] = {}
        self._pipelines: dict[tuple[Any, ...], Any] = {}
        self._staging: Any = None
        self._staging_lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            tuning=TUNING.get(self.kind, APPLE),
            tensor_ops=not self.tensor_problem,
            unified_memory=bool(self.info["unified_memory"]),
            max_threads=int(self.info["max_threads"]),
            working_set=int(self.info["working_set"]),
            max_buffer_length=int(self.info["max_buffer_length"]),
        )

    @cached_property
    def tensor_problem(self) -> str:
        """Why matrix tiles do not run on tensor operations here (P6); empty when they do. Decided once, by the GPU's family and by
        kernels that must compile and agree with those on simdgroup matrices."""
        if not self.info["tensor_ops"]:
            return "the device offers no tensor operations"
        return selftest.tensor_problem(self)

    def library(self, family: str, version: str = "") -> Any:
        """The compiled library of a kernel family; each family is compiled on first use, so one bad kernel cannot take the rest down.
        `version`: language version, empty for the one that the family needs."""
        version = version or language_version(family)
        key = (family, version)
        if key not in self._libraries:
            self._libraries[key] = self.native.library(kernel_source(family), family, version)
        return self._libraries[key]

    def pipeline(self, family: str, function: str, constants: Sequence[tuple[int, str, float | int | bool]] = (), threads: int = 0) -> Any:
        """A pipeline, cached by function and constants. Raises DeviceError when it allows fewer threads than the launch
        needs: Metal would drop such a launch silently."""
        key = (family, function, tuple(constants))
        found = self._pipelines.get(key)
        if found is None:
            found = self.native.pipeline(self.library(family), function, {i: (t, v) for i, t, v in constants}, function)
            self._pipelines[key] = found
        if threads > found.max_threads:
            raise DeviceError(f"kernel {function} allows {found.max_threads} threads per threadgroup on {self.name}, the launch needs {threads}")
        return found

    def prepare(self, dispatches: Iterable[Dispatch]) -> None:
        """Makes the pipelines of the dispatches that do not exist yet, on several threads: compiling may take long."""
        wanted = {(d.family, d.function, d.constants): None for d in dispatches if (d.family, d.function, d.constants) not in self._pipelines}
        if len(wanted) < 2:
            return
        for family, _, _ in wanted:
            self.library(family)
        with ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1), thread_name_prefix="lily-compile") as pool:
            list(pool.map(lambda key: self.pipeline(*key), wanted))

    # -- memory ----------------------------------------------------------------------------------------------------------
    def buffer(self, nbytes: int, label: str, *, tracked: bool = True) -> Any:
        """Memory that kernels work on, of at least one byte; its contents are undefined until written. The CPU reaches it with `read` and `write`."""
        storage = "shared" if self.info["unified_memory"] else "private"
        return self.native.buffer(max(-(-nbytes // 4) * 4, 16), storage, label, tracked)

    def host_buffer(self, nbytes: int, label: str) -> Any:
        """Memory with a `view()` for the CPU, which kernels reach too, but slowly where memory is not unified."""
        return self.native.buffer(max(-(-nbytes // 4) * 4, 16), "shared", label, True)

    def read(self, buffer: Any, offset: int = 0, nbytes: int | None = None) -> np.ndarray:
        """A copy of `nbytes` bytes of a buffer from `offset` on (both multiples of 4; None = to the end), uint8. Nothing may be writing it."""
        nbytes = buffer.nbytes - offset if nbytes is None else nbytes
        if self.info["unified_memory"]:
            data: np.ndarray = buffer.view()[offset : offset + nbytes].copy()
            return data
        out = np.empty(nbytes, np.uint8)
        with self._staging_lock:
            view = self._staged()
            for at in range(0, nbytes, _STAGING_BYTES):
                size = min(_STAGING_BYTES, nbytes - at)
                self.native.blit([(buffer, offset + at, self._staging, 0, size)])
                out[at : at + size] = view[:size]
        return out

    def write(self, buffer: Any, data: np.ndarray, offset: int = 0) -> None:
        """Puts the bytes of `data` into a buffer from `offset` on (size and offset multiples of 4). Nothing may be using that range."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if self.info["unified_memory"]:
            buffer.view()[offset : offset + raw.nbytes] = raw
            return
        with self._staging_lock:
            view = self._staged()
            for at in range(0, raw.nbytes, _STAGING_BYTES):
                size = min(_STAGING_BYTES, raw.nbytes - at)
                view[:size] = raw[at : at + size]
                self.native.blit([(self._staging, 0, buffer, offset + at, size)])

    def _staged(self) -> np.ndarray:
        if self._staging is None:
            self._staging = self.host_buffer(_STAGING_BYTES, "staging")
        view: np.ndarray = self._staging.view()
        return view

    def record(self, dispatches: Iterable[Dispatch], buffers: Mapping[str, Any], *, concurrent: bool = True) -> Any:
        """Records scheduled dispatches into a native program. `buffers` maps a region's buffer name to its buffer."""
        dispatches = list(dispatches)
        self.prepare(dispatches)
        layouts = structs()
        native: list[_native.Dispatch] = []
        for d, barrier in zip(dispatches, barriers(dispatches), strict=True):
            threads = d.threads[0] * d.threads[1] * d.threads[2]
            bindings = [(b.index, buffers[b.region.buffer], b.region.offset) for b in d.bindings]
            cost = _LAUNCH_NS + max((d.bytes_read + d.bytes_written) / _BYTES_PER_NS, d.macs / _MACS_PER_NS)
            native.append((self.pipeline(d.family, d.function, d.constants, threads), bindings, layouts[d.args_struct].pack(dict(d.args)),
                           d.args_index, d.grid, d.threads, barrier, cost, d.id, []))
        return _native.Program(self.native, native, concurrent)
