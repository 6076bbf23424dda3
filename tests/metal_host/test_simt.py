"""The SIMT engine: simd operations, barriers, atomics, matrices, math, in every order of execution."""
import importlib.util
import threading

import numpy as np
import pytest

from . import simt_engine as simt

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed: the engine cannot be compiled here")
ORDERS = [(simt.FORWARD, 0), (simt.REVERSE, 0), (simt.RANDOM, 1), (simt.RANDOM, 7)]

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant uint N [[function_constant(3)]];
constant float SCALE [[function_constant(5)]];
constant bool EXTRA [[function_constant(6)]];

kernel void simd_ops(device float* f [[buffer(0)]], device uint* u [[buffer(1)]], device float4* v [[buffer(2)]],
                     uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  const float x = float(lane) + 0.5f;
  f[i * 8 + 0] = simd_sum(x);
  f[i * 8 + 1] = simd_max(x);
  f[i * 8 + 2] = simd_min(x);
  f[i * 8 + 3] = simd_shuffle_xor(x, 5);
  f[i * 8 + 4] = simd_shuffle_down(x, 3);
  f[i * 8 + 5] = simd_shuffle_up(x, 4);
  f[i * 8 + 6] = simd_broadcast(x, 9);
  f[i * 8 + 7] = simd_shuffle(x, ushort(31 - lane));
  u[i * 6 + 0] = simd_prefix_exclusive_sum(lane);
  u[i * 6 + 1] = simd_prefix_inclusive_sum(lane);
  u[i * 6 + 2] = simd_any(lane == 31);
  u[i * 6 + 3] = simd_all(lane < 31);
  u[i * 6 + 4] = uint(ulong(simd_ballot(lane % 3 == 0)));
  u[i * 6 + 5] = simd_sum(lane);
  v[i] = simd_sum(float4(1, x, 2 * x, -x));
}
kernel void partial(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  if (i % 32 >= 20) return;
  out[i] = simd_sum(1.0f);
}
kernel void divergent(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float r;
  if (i & 1)
    r = simd_sum(1.0f);
  else
    r = simd_sum(100.0f);
  out[i] = r + simd_sum(0.5f);
}
kernel void loop(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  float r = 0;
  for (uint k = 0; k < (i & 3); k++)
    r += simd_sum(1.0f);
  out[i] = simd_max(r);
}
kernel void scan(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]], device atomic_uint* total [[buffer(2)]],
                 uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                 uint sg [[simdgroup_index_in_threadgroup]], uint nsg [[simdgroups_per_threadgroup]]) {
  threadgroup uint sums[32];
  const uint x = in[i], before = simd_prefix_exclusive_sum(x);
  if (lane == 31) sums[sg] = before + x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint base = 0;
  for (uint s = 0; s < sg; s++) base += sums[s];
  out[i] = base + before;
  atomic_fetch_add_explicit(total, x, memory_order_relaxed);
}
kernel void ragged(device uint* out [[buffer(0)]], uint2 at [[thread_position_in_grid]], uint2 grid [[threads_per_grid]],
                   uint2 size [[threads_per_threadgroup]], uint2 nominal [[dispatch_threads_per_threadgroup]]) {
  out[at.y * grid.x + at.x] = 1 + size.x * nominal.y;
}
kernel void constants(device float* out [[buffer(0)]]) {
  for (uint i = 0; i < N; i++) out[i] = SCALE;
  if (is_function_constant_defined(EXTRA)) out[N] = EXTRA ? 2.0f : 1.0f;
}
kernel void dynamic(device uint* out [[buffer(0)]], threadgroup uint* a [[threadgroup(0)]], threadgroup uint* b [[threadgroup(2)]],
                    uint i [[thread_index_in_threadgroup]]) {
  a[i] = i;
  b[i] = 100 + i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = a[63 - i] + b[63 - i];
}
kernel void poisoned(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]]) {
  threadgroup float t[32];
  out[g * 32 + i] = t[i];
  t[i] = 1.0f;
}
template <typename T>
kernel void product(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]], device float* c [[buffer(2)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup T tile[2][8][8];
  for (uint i = t; i < 64; i += 32) { tile[0][i / 8][i % 8] = a[i]; tile[1][i / 8][i % 8] = b[i]; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(left, &tile[0][0][0], 8);
  simdgroup_load(right, &tile[1][0][0], 8, ulong2(0), true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, c, 8);
  simdgroup_store(sum, c + 64, 8, ulong2(0), true);
}
template [[host_name("product_f32")]] kernel void product<float>(device const float*, device const float*, device float*, uint);
template [[host_name("product_f16")]] kernel void product<half>(device const half*, device const half*, device float*, uint);
template [[host_name("product_bf16")]] kernel void product<bfloat>(device const bfloat*, device const bfloat*, device float*, uint);
kernel void math(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  const float v = x[i];
  y[i] = exp(v); y[n + i] = exp2(v); y[2 * n + i] = log(v); y[3 * n + i] = log2(v); y[4 * n + i] = tanh(v); y[5 * n + i] = rsqrt(v);
  y[6 * n + i] = sin(v); y[7 * n + i] = pow(fabs(v), 0.3f); y[8 * n + i] = log10(v); y[9 * n + i] = exp10(v); y[10 * n + i] = round(v);
}
kernel void to_bfloat(device const float* x [[buffer(0)]], device bfloat* y [[buffer(1)]], uint i [[thread_position_in_grid]]) { y[i] = bfloat(x[i]); }
"""


@pytest.fixture(scope="module", params=["x86-64-v3", "x86-64-v4"])
def module(request):
    if not simt.engine().lily_simt_cpu_has(request.param.encode()):
        pytest.skip(f"this processor is no {request.param}")
    status, messages, path = simt.compile_metal(SOURCE, target=request.param)
    assert status == 0, messages
    return simt.Module(path)


@pytest.mark.parametrize("order,seed", ORDERS)
@pytest.mark.parametrize("threads", [32, 96])
def test_simd_operations(module, order, seed, threads):
    f, u, v = np.full((threads, 8), np.nan, np.float32), np.zeros((threads, 6), np.uint32), np.full((threads, 4), np.nan, np.float32)
    module.run("simd_ops", [f, u, v], 1, threads, order=order, seed=seed)
    lane = np.arange(threads) % 32
    x = lane + 0.5
    first = np.arange(threads) - lane
    at = lambda source: (first + source) % threads + 0 * source
    expect = [np.full(threads, 512.0), np.full(threads, 31.5), np.full(threads, 0.5), x[at(lane ^ 5)], np.where(lane + 3 > 31, x, lane + 3.5),
              np.where(lane < 4, x, lane - 3.5), np.full(threads, 9.5), 31.5 - lane]
    assert np.array_equal(f, np.stack(expect, 1).astype(np.float32))
    ballot = sum(1 << k for k in range(0, 32, 3))
    expect = [lane * (lane - 1) // 2, lane * (lane + 1) // 2, 0 * lane + 1, 0 * lane, 0 * lane + ballot, 0 * lane + 496]
    assert np.array_equal(u, np.stack(expect, 1))
    assert np.array_equal(v, np.tile(np.array([32, 512, 1024, -512], np.float32), (threads, 1)))


@pytest.mark.parametrize("order,seed", ORDERS)
def test_lanes_that_have_returned_take_no_part(module, order, seed):
    out = np.zeros(64, np.float32)
    module.run("partial", [out], 1, 64, order=order, seed=seed)
    assert np.array_equal(out, np.where(np.arange(64) % 32 < 20, 20, 0))


@pytest.mark.parametrize("order,seed", ORDERS)
def test_divergent_simd_operations_group_by_line(module, order, seed):
    out = np.zeros(32, np.float32)
    stats = module.run("divergent", [out], 1, 32, order=order, seed=seed)
    assert np.array_equal(out, np.where(np.arange(32) & 1, 16.0, 1600.0) + 16)
    assert stats.divergent
    out[:] = 0
    module.run("loop", [out], 1, 32, order=order, seed=seed)
    assert np.array_equal(out, np.full(32, 24.0 + 16 + 8))


def test_strict_simd_refuses_divergence(module):
    with pytest.raises(simt.Failure, match="kernel divergent .*simd operation at line"):
        module.run("divergent", [np.zeros(32, np.float32)], 1, 32, strict=2)


@pytest.mark.parametrize("order,seed", ORDERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_threadgroups_barriers_and_atomics(module, order, seed, workers):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, (50, 256)).astype(np.uint32)
    out, total = np.zeros_like(values), np.zeros(1, np.uint32)
    stats = module.run("scan", [values, out, total], 50, 256, order=order, seed=seed, workers=workers)
    assert np.array_equal(out, np.cumsum(values, 1) - values)
    assert total[0] == values.sum()
    assert (stats.threadgroups, stats.threads, stats.barriers) == (50, 50 * 256, 50)
    assert stats.threadgroup_peak == 128


def test_grid_of_threads_with_ragged_edges(module):
    out = np.zeros((10, 21), np.uint32)
    module.run("ragged", [out], (3, 2), (8, 6), grid=(21, 10, 1))
    expect = np.full((10, 21), 1 + 8 * 6)
    expect[:, 16:] = 1 + 5 * 6
    assert np.array_equal(out, expect)


def test_function_constants(module):
    out = np.zeros(8, np.float32)
    module.run("constants", [out], 1, 1, constants={3: 4, 5: 0.25})
    assert out.tolist() == [0.25] * 4 + [0] * 4
    module.run("constants", [out], 1, 1, constants={3: 2, 5: 3.0, 6: 1})
    assert out.tolist() == [3, 3, 2, 0.25] + [0] * 4


@pytest.mark.parametrize("order,seed", ORDERS)
def test_threadgroup_memory_set_by_the_host(module, order, seed):
    out = np.zeros(64, np.uint32)
    module.run("dynamic", [out], 1, 64, threadgroup={0: 256, 2: 256}, order=order, seed=seed)
    assert np.array_equal(out, 100 + 2 * (63 - np.arange(64)))


def test_threadgroup_memory_starts_as_nan_in_every_group(module):
    out = np.zeros((8, 32), np.float32)
    module.run("poisoned", [out], 8, 32, workers=1)
    assert np.isnan(out).all()


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_simdgroup_matrix(module, name):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 8, (8, 8)).astype(np.float32) / 4 for _ in range(2))
    pack = {"f32": lambda x: x, "f16": lambda x: x.astype(np.float16), "bf16": bf16}[name]
    c = np.full((2, 8, 8), np.nan, np.float32)
    module.run(f"product_{name}", [pack(a), pack(b), c], 1, 32)
    assert np.array_equal(c[0], a @ b.T + 1)
    assert np.array_equal(c[1], (a @ b.T + 1).T)


def test_math_is_exact_to_a_few_units_in_the_last_place(module):
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-90, 90, 4000), rng.uniform(-1, 1, 2000), 10 ** rng.uniform(-37, 37, 2000), [0, -0.0, 1, 88.72, 89, -104, 1e-40, 3e38]])
    x = np.concatenate([x, [np.inf, -np.inf, np.nan, 128, -150, 0.5, -0.5, 2.5]]).astype(np.float32)
    x = np.concatenate([x, np.zeros(-len(x) % 32, np.float32)])
    n, y = len(x), np.zeros((11, len(x)), np.float32)
    module.run("math", [x, y, np.array([n], np.uint32)], n // 32, 32)
    with np.errstate(all="ignore"):
        d = x.astype(np.float64)
        reference = [np.exp(d), np.exp2(d), np.log(d), np.log2(d), np.tanh(d), 1 / np.sqrt(d), np.sin(d), np.abs(d) ** np.float64(np.float32(0.3)), np.log10(d),
                     10.0 ** d, np.trunc(d) + np.where(np.abs(d - np.trunc(d)) >= 0.5, np.sign(d), 0)]
        limits = [2.5, 3, 3, 4, 4, 1.6, 2, 2, 4, 4, 0]
        for row, (got, want, limit) in enumerate(zip(y, reference, limits)):
            rounded = want.astype(np.float32)
            same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
            unit = np.maximum(np.spacing(np.abs(rounded)).astype(np.float64), 2.0 ** -149)
            error = np.where(same, 0, np.abs(got.astype(np.float64) - want) / unit)
            error = np.where(np.isinf(rounded) & ~same, np.inf, error)
            worst = int(np.argmax(error))
            assert error[worst] <= limit, (row, x[worst], got[worst], want[worst])


def test_bfloat_rounds_to_nearest_even(module):
    x = np.array([1.0, 1.00390625, 1.01171875, -1.005, 3.4e38, np.inf, -np.inf, np.nan, 1e-40, 0, -0.0] + [0] * 21, np.float32)
    y = np.zeros(32, np.uint16)
    module.run("to_bfloat", [x, y], 1, 32)
    assert [hex(v) for v in y[:11]] == ["0x3f80", "0x3f80", "0x3f82", "0xbf81", "0x7f80", "0x7f80", "0xff80", "0x7fc0", "0x1", "0x0", "0x8000"]


def test_several_dispatches_of_one_call_share_the_workers(module):
    outs = [np.zeros(64, np.uint32) for _ in range(5)]
    dispatches = [module.dispatch("dynamic", [o], 1, 64, threadgroup={0: 256, 2: 256}) for o in outs]
    for order, seed in ORDERS:
        for o in outs:
            o[:] = 0
        simt.run(dispatches, order=order, seed=seed)
        assert all(np.array_equal(o, 100 + 2 * (63 - np.arange(64))) for o in outs)


def test_runs_from_several_threads(module):
    rng = np.random.default_rng(3)
    faults = []

    def body():
        for _ in range(50):
            values = rng.integers(0, 100, (4, 64)).astype(np.uint32)
            out, total = np.zeros_like(values), np.zeros(1, np.uint32)
            module.run("scan", [values, out, total], 4, 64)
            if not np.array_equal(out, np.cumsum(values, 1) - values):
                faults.append(1)

    threads = [threading.Thread(target=body) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not faults


def test_pool_can_be_stopped_and_starts_again(module):
    for _ in range(3):
        out = np.zeros((8, 32), np.float32)
        module.run("poisoned", [out], 8, 32, workers=2)
        assert np.isnan(out).all()
        simt.engine().lily_simt_shutdown()


def bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
