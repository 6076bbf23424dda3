// RMSNorm over whole activation rows: out = x * rsqrt(mean(x^2) + eps) * w.
#include "common.h"
#include "lanes.h"

constant constexpr uint kMaxSimdgroups = 8;

// Sum over the threadgroup. One simdgroup needs neither threadgroup memory nor a barrier.
METAL_FUNC float threadgroup_sum(float value, threadgroup float* partial, uint simdgroups, uint simdgroup_index, uint lane) {
  const float own = simd_sum(value);
  if (simdgroups == 1) return own;
  if (lane == 0) partial[simdgroup_index] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
  for (uint i = 0; i < simdgroups; i++) total += partial[i];
  return total;
}

METAL_FUNC void scale_row(device const bfloat* x, device const float* w, device bfloat* out, uint n, float scale, uint thread_index, uint threads) {
  for (uint column = thread_index * kChunk; column < n; column += threads * kChunk) {
    float value[kChunk], weight[kChunk];
    load_chunk(x + column, value);
    load_chunk(w + column, weight);
    for (uint i = 0; i < kChunk; i++) value[i] = value[i] * scale * weight[i];
    store_chunk(out + column, value);
  }
}

// Called before the first block's projections and before the head. One threadgroup per row; the row is read twice,
// the second time from cache, so any n (a multiple of 8) fits any number of threads.
[[kernel, max_total_threads_per_threadgroup(256)]] void rmsnorm(
    device const bfloat* x [[buffer(0)]],      // [rows, n]
    device const float* w [[buffer(1)]],       // [n]
    device bfloat* out [[buffer(2)]],          // [rows, n]
    constant NormArgs& args [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[kMaxSimdgroups];
  x += ulong(row) * args.n;
  out += ulong(row) * args.n;
  float square[kChunk] = {0.0f};
  for (uint column = thread_index * kChunk; column < args.n; column += threads * kChunk) {
    float value[kChunk];
    load_chunk(x + column, value);
    for (uint i = 0; i < kChunk; i++) square[i] = fma(value[i], value[i], square[i]);
  }
  const float total = threadgroup_sum(sum_chunk(square), partial, simdgroups, simdgroup_index, lane);
  scale_row(x, w, out, args.n, precise::rsqrt(total / float(args.n) + args.eps), thread_index, threads);
}

// Called between a block's mixer and its experts, and between blocks: the residual addition rides along with the norm
// that reads its result, which saves a launch and a pass over h. The norm sees h as the next kernels will: rounded to bf16.
[[kernel, max_total_threads_per_threadgroup(256)]] void add_rmsnorm(
    device bfloat* h [[buffer(0)]],            // [rows, n], h += y
    device const bfloat* y [[buffer(1)]],      // [rows, n]
    device const float* w [[buffer(2)]],       // [n]
    device bfloat* out [[buffer(3)]],          // [rows, n]
    constant NormArgs& args [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float partial[kMaxSimdgroups];
  h += ulong(row) * args.n;
  y += ulong(row) * args.n;
  out += ulong(row) * args.n;
  float square[kChunk] = {0.0f};
  for (uint column = thread_index * kChunk; column < args.n; column += threads * kChunk) {
    float value[kChunk], addend[kChunk];
    load_chunk(h + column, value);
    load_chunk(y + column, addend);
    for (uint i = 0; i < kChunk; i++) value[i] = float(bfloat(value[i] + addend[i]));
    store_chunk(h + column, value);
    for (uint i = 0; i < kChunk; i++) square[i] = fma(value[i], value[i], square[i]);
  }
  const float total = threadgroup_sum(sum_chunk(square), partial, simdgroups, simdgroup_index, lane);
  // Each thread reads back only what it wrote itself, so device memory needs no barrier.
  scale_row(h, w, out, args.n, precise::rsqrt(total / float(args.n) + args.eps), thread_index, threads);
}
