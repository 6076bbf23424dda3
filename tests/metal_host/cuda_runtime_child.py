"""Scenarios on the CUDA device with a fake driver, each in a process of its own: cuda_runtime_child.py SCENARIO prints one JSON."""

from __future__ import annotations

import json
import struct
import sys
from typing import Any

from lily import _native
from lily.errors import DeviceError, LilyError
from lily.gpu import Gpu, kernel_source


def caught(call: Any) -> str:
    try:
        call()
    except LilyError as error:
        return str(error)
    return ""


class Silu:
    """Dispatches of one small kernel of the package."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.pipeline = gpu.pipeline("activation", "silu_mul")
        self.buffers = [gpu.buffer(65536, f"b{i}") for i in range(2)]

    def dispatch(self, barrier: bool, groups: int = 1, threads: int = 64) -> Any:
        args = struct.pack("4I", 1, 64, 128, 64)
        return (self.pipeline, [(0, self.buffers[0], 0), (1, self.buffers[1], 0)], args, 2, (groups, 1, 1), (threads, 1, 1), barrier, 1.0, "silu", [])

    def run(self, *barriers: bool, concurrent: bool = True, groups: int = 1) -> Any:
        return _native.Program(self.gpu.native, [self.dispatch(b, groups) for b in barriers], concurrent).run()


def devices() -> Any:
    return {"names": [d["name"] for d in _native.devices()], "absent": _native.absent_devices(), "error": caught(lambda: Gpu("cuda")), "default": Gpu().kind}


def facts() -> Any:
    gpu = Gpu("cuda")
    return {"info": gpu.info, "kind": gpu.kind}


def memory() -> Any:
    gpu = Gpu("cuda")
    buffer = gpu.buffer(1 << 20, "b")
    view = ""
    try:
        buffer.view()
    except ValueError as error:
        view = str(error)
    return {"view": view, "second": caught(lambda: gpu.buffer(1 << 20, "second")), "cpu": caught(lambda: Gpu("cpu").buffer(64, "c"))}


def sticky() -> Any:
    gpu = Gpu("cuda")
    first, second = gpu.buffer(64, "a"), gpu.buffer(64, "b")
    answers = [caught(lambda: first.fill(1)), caught(lambda: first.copy_to(second, 0, 0, 64)), caught(lambda: first.fill(2))]
    cpu = Gpu("cpu")
    buffer = cpu.buffer(64, "c")
    buffer.fill(7)
    return {"cuda": answers, "cpu": int(cpu.read(buffer)[63])}


def levels() -> Any:
    silu = Silu(Gpu("cuda"))
    silu.run(False, False, True, True, False, True)  # 2 | 1 | 2 | 1
    return {}


def wide() -> Any:
    silu = Silu(Gpu("cuda"))
    silu.run(*[False] * 5, True, *[False] * 4)  # 5 | 5: 25 edges go through an empty node
    return {}


def serial() -> Any:
    Silu(Gpu("cuda")).run(False, False, False, concurrent=False)
    return {}


def replay() -> Any:
    silu = Silu(Gpu("cuda"))
    for groups in (1, 1, 1, *range(2, 52)):
        silu.run(False, True, groups=groups)
    return {}


def ragged() -> Any:
    silu = Silu(Gpu("cuda"))
    _native.Program(silu.gpu.native, [silu.dispatch(False, threads=40)], True).run()
    return {}


def compiler() -> Any:
    gpu = Gpu("cuda")
    return {"error": caught(lambda: gpu.pipeline("activation", "silu_mul")), "unknown": caught(lambda: gpu.native.library("kernel", "text"))}


def launch_failure() -> Any:
    silu = Silu(Gpu("cuda"))
    return {"first": caught(lambda: silu.run(False, True)), "second": caught(lambda: silu.run(False, True))}


def generate() -> Any:
    import lily

    model = lily.Model.load("lily-tiny", device="cuda")
    reply = model.generate(prompt_ids=list(range(5, 40)), max_tokens=20)
    return {"tokens": len(reply.token_ids), "state": sorted(n.split(".")[0] for n in model._session.state_arrays())[-1]}


if __name__ == "__main__":
    assert kernel_source("activation")
    try:
        print(json.dumps(globals()[sys.argv[1]]()))
    except DeviceError as failure:
        print(json.dumps({"failed": str(failure)}))
