"""Pairs of dispatches on two halves of a buffer, run under the hazard recorder; a child of test_hazards.py, since
LILY_METAL_HOST is read once per process. Prints JSON: per case the error (or "") and what was recorded."""

from __future__ import annotations

import json
from typing import Any

from lily import _native
from lily.errors import DeviceError

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void produce(device uint *to [[buffer(0)]], uint i [[thread_position_in_grid]]) { to[i] = i; }
kernel void consume(device const uint *from [[buffer(0)]], device uint *to [[buffer(1)]], uint i [[thread_position_in_grid]]) { to[i] = from[i]; }
kernel void even(device uint *to [[buffer(0)]], uint i [[thread_position_in_grid]]) { to[2 * i] = i; }
kernel void odd(device uint *to [[buffer(0)]], uint i [[thread_position_in_grid]]) { to[2 * i + 1] = i; }
kernel void count(device atomic_uint *to [[buffer(0)]]) { atomic_fetch_add_explicit(to, 1u, memory_order_relaxed); }
kernel void look(device const atomic_uint *from [[buffer(0)]], device uint *to [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  to[i] = atomic_load_explicit(from, memory_order_relaxed);
}
"""
SHARED, OTHER, SHIFTED = ("shared", 0), ("other", 0), ("shared", 128)  # 32 threads touch 128 bytes
CASES: dict[str, list[tuple[str, list[tuple[str, int]]]]] = {
    "read after write": [("produce", [SHARED]), ("consume", [SHARED, OTHER])],
    "write after read": [("consume", [SHARED, OTHER]), ("produce", [SHARED])],
    "write after write": [("produce", [SHARED]), ("consume", [OTHER, SHARED])],
    "in part": [("produce", [("shared", 64)]), ("consume", [SHIFTED, OTHER])],
    "atomics": [("count", [SHARED]), ("count", [SHARED])],
    "atomic load": [("count", [SHARED]), ("look", [SHARED, OTHER])],
    "both read": [("consume", [SHARED, OTHER]), ("consume", [SHARED, SHIFTED])],
    "side by side": [("produce", [SHARED]), ("consume", [SHIFTED, OTHER])],
    "interleaved": [("even", [SHARED]), ("odd", [SHARED])],
}


class Pair:
    def __init__(self) -> None:
        self.device = _native.Device()
        library = self.device.library(SOURCE, "hazards")
        names = {name for case in CASES.values() for name, _ in case}
        self.pipelines = {name: self.device.pipeline(library, name) for name in names}
        self.buffers = {name: self.device.buffer(256, label=name) for name in ("shared", "other")}
        for buffer in self.buffers.values():
            buffer.fill(0)

    def run(self, case: list[tuple[str, list[tuple[str, int]]]], barrier: bool, concurrent: bool = True) -> dict[str, Any]:
        dispatches: list[Any] = [
            (self.pipelines[kernel], [(i, self.buffers[name], offset) for i, (name, offset) in enumerate(places)], None, 1 if len(places) == 1 else 2,
             (1, 1, 1), (32, 1, 1), barrier and n > 0, 1000.0, kernel, [])
            for n, (kernel, places) in enumerate(case)
        ]
        _native.recorded_accesses()
        try:
            _native.Program(self.device, dispatches, concurrent).run(1e12)
            error = ""
        except DeviceError as failure:
            error = str(failure)
        return {"error": error, "accesses": _native.recorded_accesses()}


def main() -> None:
    pair = Pair()
    results = {name: {"bare": pair.run(case, False), "barrier": pair.run(case, True), "serial": pair.run(case, False, concurrent=False)}
               for name, case in CASES.items()}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
