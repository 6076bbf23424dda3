"""Small kernels and dispatches for the tests of lily._native."""

from __future__ import annotations

import struct
from typing import Any

import pytest

native = pytest.importorskip("lily._native")

SOURCE = """#include <metal_stdlib>
using namespace metal;
constant uint scale [[function_constant(0)]];
kernel void add_one(device uint *x [[buffer(0)]], constant uint &n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i < n) x[i] += 1;
}
kernel void multiply(device uint *x [[buffer(0)]], constant uint &n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i < n) x[i] *= scale;
}
kernel void diverge(device uint *x [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  if (i < 16) threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = i;
}
kernel void scratch(device uint *x [[buffer(0)]], threadgroup uint *t [[threadgroup(0)]], uint i [[thread_position_in_threadgroup]]) {
  t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = t[31 - i];
}
// A decode step in small: position, slot and step advance, token = 100 + step; done when the step equals stop.
struct StepState { uint position, slot, step, done, tokens[2], history[16], flags[16]; };
kernel void advance_step(device StepState &s [[buffer(0)]], constant uint &stop [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i != 0 || s.done != 0) return;
  uint n = s.step;
  s.history[n % 16] = 100 + n;
  s.tokens[(n + 1) & 1] = 100 + n;
  s.position += 1; s.slot = (s.slot + 1) % 3; s.step = n + 1;
  if (n == stop) s.done = 1;
  s.flags[n % 16] = s.done;
}
kernel void slow(device uint *x [[buffer(0)]], constant uint &n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  uint v = x[i];
  for (uint k = 0; k < n; k++) v = v * 1664525u + 1013904223u;
  x[i] = v;
}
"""


class Kernels:
    """The library above on the default device."""

    def __init__(self) -> None:
        pytest.importorskip("ziglang", reason="compiles kernels at run time") if native.live_objects() is not None else None
        self.device = native.Device()
        self.library = self.device.library(SOURCE, "test kernels")

    def pipeline(self, name: str, scale: int = 3) -> Any:
        return self.device.pipeline(self.library, name, {0: ("uint", scale)})

    def dispatch(
        self,
        name: str,
        bindings: list[tuple[int, Any, int]],
        value: int | None = None,
        *,
        groups: int = 1,
        threads: int = 32,
        barrier: bool = False,
        cost: float = 1000.0,
        memory: tuple[tuple[int, int], ...] = (),
        scale: int = 3,
    ) -> tuple[Any, ...]:
        args = None if value is None else struct.pack("I", value)
        size = (groups, 1, 1), (threads, 1, 1)
        return (self.pipeline(name, scale), bindings, args, 1, *size, barrier, cost, name, list(memory))
