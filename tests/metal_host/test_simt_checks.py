"""What the engine catches: barriers, threadgroup memory, races, wild accesses, and in strict modules every access."""
import importlib.util

import numpy as np
import pytest

from . import simt_engine as simt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed: the engine cannot be compiled here")

SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void race(device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                 uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float t[8];
  const float v = simd_sum(float(i));
  if (lane == 0) t[sg] = v;
  float s = 0;                                      // a threadgroup_barrier is missing here
  for (int k = 0; k < 8; k++) s += t[k];
  o[i] = s;
}
kernel void returned(device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 48) threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = 1;
}
kernel void two_barriers(device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 48)
    threadgroup_barrier(mem_flags::mem_threadgroup);
  else
    threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = 1;
}
kernel void overrun(device float* o [[buffer(0)]], constant uint& n [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float t[64];
  t[i + n] = 1;
  o[i] = t[i];
}
kernel void big(device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float t[9000];
  t[i] = 1;
  o[i] = t[i];
}
kernel void unbound(device float* o [[buffer(0)]], device const float* x [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) { o[i] = x[i]; }
kernel void outside(device float* o [[buffer(0)]], device const float* x [[buffer(1)]], constant uint& n [[buffer(2)]], uint i [[thread_index_in_threadgroup]]) {
  o[i] = x[i + n];
}
kernel void misaligned(device float* o [[buffer(0)]], device const uchar* x [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  o[i] = *(device const float*)(x + 4 * i + 2);
}
kernel void underrun(device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float t[64];
  t[int(i) - 1] = 1;
  o[i] = t[i];
}
kernel void inactive(device float* o [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i < 16) o[i] = simd_shuffle(float(i), 20);
}
kernel void fine(device float* o [[buffer(0)]], device const float4* x [[buffer(1)]], threadgroup float* dynamic [[threadgroup(0)]],
                 uint i [[thread_index_in_threadgroup]]) {
  constexpr float table[4] = {1, 2, 3, 4};
  threadgroup float t[64];
  float mine[8];
  for (uint k = 0; k < 8; k++) mine[k] = x[i][k & 3] * table[k & 3];
  t[i] = mine[i & 7];
  dynamic[i] = 1;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  o[i] = t[63 - i] + simd_sum(mine[0]) + dynamic[63 - i];
}
"""


@pytest.fixture(scope="module")
def module():
    status, messages, path = simt.compile_metal(SOURCE, target="x86-64-v3", name="checks.metal")
    assert status == 0, messages
    return simt.Module(path)


@pytest.fixture(scope="module")
def strict():
    status, messages, path = simt.compile_metal(SOURCE, "--strict", target="x86-64-v3", name="checks.metal")
    assert status == 0, messages
    module = simt.Module(path)
    assert module.description.strict == 1
    return module


def test_barrier_not_reached_by_all(module):
    with pytest.raises(simt.Failure, match=r"kernel returned \(checks.metal:\d+\): threadgroup_barrier at line 14 is not reached by every thread"):
        module.run("returned", [np.zeros(64, np.float32)], 1, 64)
    module.run("returned", [np.zeros(64, np.float32)], 1, 64, strict=0)


def test_threads_at_different_barriers(module):
    with pytest.raises(simt.Failure, match=r"kernel two_barriers .*different threadgroup_barriers"):
        module.run("two_barriers", [np.zeros(64, np.float32)], 1, 64)


def test_overrun_of_threadgroup_memory(module):
    out = np.zeros(64, np.float32)
    module.run("overrun", [out, np.array([0], np.uint32)], 1, 64)
    with pytest.raises(simt.Failure, match=r"kernel overrun \(checks.metal:24\): threadgroup memory overrun: .*256 bytes \[threadgroup 0,0,0, thread 63\]"):
        module.run("overrun", [out, np.array([1], np.uint32)], 1, 64)
    module.run("overrun", [out, np.array([0], np.uint32)], 1, 64)          # the engine goes on


def test_too_much_threadgroup_memory(module):
    with pytest.raises(simt.Failure, match="kernel big: threadgroup memory of 36000 bytes exceeds the limit of 32768"):
        module.run("big", [np.zeros(64, np.float32)], 1, 64)
    with pytest.raises(simt.Failure, match="kernel fine: threadgroup memory of 512 bytes exceeds the limit of 300"):
        module.run("fine", [np.zeros(64, np.float32), np.zeros(256, np.float32)], 1, 64, threadgroup={0: 256}, limit=300)


def test_missing_barrier_shows(module):
    seen = set()
    for order, seed in [(simt.FORWARD, 0), (simt.REVERSE, 0), (simt.RANDOM, 1)]:
        out = np.zeros(256, np.float32)
        module.run("race", [out], 1, 256, order=order, seed=seed)
        seen.add(out.tobytes())
        assert np.isnan(out).any()
    assert len(seen) > 1


def test_wild_accesses_end_the_dispatch_and_not_the_process(module):
    with pytest.raises(simt.Failure, match="kernel unbound .*not bound"):
        module.run("unbound", {0: np.zeros(64, np.float32)}, 1, 64)
    with pytest.raises(simt.Failure, match="kernel outside .*unmapped memory"):
        module.run("outside", [np.zeros(64, np.float32), np.zeros(64, np.float32), np.array([1 << 30], np.uint32)], 1, 64)


def test_thread_limit(module):
    with pytest.raises(simt.Failure, match="kernel unbound: 1025 threads per threadgroup"):
        module.run("unbound", [np.zeros(64, np.float32)] * 2, 1, 1025)


def test_strict_module_accepts_right_accesses(strict, module):
    x = np.random.default_rng(0).normal(size=256).astype(np.float32)
    for m in (strict, module):
        out = np.full(64, np.nan, np.float32)
        m.run("fine", [out, x], 1, 64, threadgroup={0: 256})
        if m is strict:
            first = out
    assert np.array_equal(out, first) and np.isfinite(out).all()


def test_strict_module_refuses_an_access_outside_its_buffers(strict):
    out, x = np.zeros(64, np.float32), np.zeros(64, np.float32)
    strict.run("outside", [out, x, np.array([0], np.uint32)], 1, 64)
    with pytest.raises(simt.Failure, match=r"kernel outside .*load of 4 bytes outside every bound buffer \(nearest: buffer 1 of 256 bytes, at offset 256\).*thread 63"):
        strict.run("outside", [out, x, np.array([1], np.uint32)], 1, 64)


def test_strict_module_refuses_a_misaligned_access(strict, module):
    out, x = np.zeros(64, np.float32), np.zeros(1024, np.uint8)
    module.run("misaligned", [out, x], 1, 32)
    with pytest.raises(simt.Failure, match="kernel misaligned .*misaligned load of 4 bytes"):
        strict.run("misaligned", [out, x], 1, 32)


def test_strict_module_refuses_threadgroup_access_before_its_object(strict):
    with pytest.raises(simt.Failure, match="kernel underrun .*store of 4 bytes outside every threadgroup object"):
        strict.run("underrun", [np.zeros(64, np.float32)], 1, 64)


def test_strict_module_refuses_a_shuffle_from_an_inactive_lane(strict):
    with pytest.raises(simt.Failure, match="kernel inactive .*simd shuffle reads a lane that does not take part"):
        strict.run("inactive", [np.zeros(32, np.float32)], 1, 32)
