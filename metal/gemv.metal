// Matrix times one activation row: the decode phase's work, and prefill's for a handful of rows (D1).
#include <metal_stdlib>
#include "common.h"
#include "quant.h"
using namespace metal;

// D1, row-parallel GEMV. A simdgroup works on passes of kRowsPerPass rows for each of its lane groups: k / 32
// lanes (at most all 32, a power of two) share a row, so a short row (k = 64: two lanes) still keeps every lane
// busy, on 64 rows at once. x stays in registers for the rows of a pass; a pass ends in one exchange between lanes.
// Each simdgroup takes a contiguous run of passes, so any grid.x is right; the one that fills a GPU is
//   grid.x = ceil(n / (gemv_rows_per_simdgroup(k) * simdgroups per threadgroup)),
//   gemv_rows_per_simdgroup(k) = kRowsPerPass * 32 / min(32, next power of two >= k / 32)
// (python/lily/plans computes the same figure), and fewer groups save thread starts on a CPU.
constant constexpr uint kRowsPerPass = 4;
constant constexpr uint kGemvThreads = 64;    // at most; 32 is right too

METAL_FUNC float row_sum(thread const float* partial) {
  return ((partial[0] + partial[4]) + (partial[2] + partial[6])) + ((partial[1] + partial[5]) + (partial[3] + partial[7]));
}

// lanes of a simdgroup that share one row
METAL_FUNC uint lanes_per_row(uint blocks) {
  uint lanes = 1;
  while (lanes < blocks && lanes < 32) lanes *= 2;
  return lanes;
}

// A short row's partial sums meet in threadgroup memory: one exchange where shuffles would need one per halving.
// Two halves alternate, so that a pass may write while lanes still read the one before.
constant constexpr uint kPassScratch = kRowsPerPass * 32;
constant constexpr uint kScratch = 2 * kPassScratch;      // floats per simdgroup

// y[0..n) = rows first .. first + n of the matrix times x. `worker` of `workers` simdgroups, scratch its own.
template <typename Matrix, typename Out>
METAL_FUNC void multiply_rows(thread const Matrix& matrix, device const bfloat* x, device Out* y, uint first, uint n,
                              threadgroup float4* scratch, uint worker, uint workers, uint lane) {
  const uint blocks = matrix.blocks, lanes = lanes_per_row(blocks);
  const uint rows = kRowsPerPass * (32 / lanes);           // rows per pass
  const uint passes = (n + rows - 1) / rows, share = (passes + workers - 1) / workers;
  const uint part = lane % lanes, row_in_pass = lane / lanes * kRowsPerPass;
  const bool one_block = blocks <= lanes;                  // then x stays in registers for all passes
  ActivationBlock activations;
  if (one_block && part < blocks) activations = load_activations(x + part * kBlock);
  for (uint pass = worker * share; pass < min(passes, (worker + 1) * share); pass++) {
    const uint row = pass * rows + row_in_pass;
    float sum[kRowsPerPass][kPartials], rest[kRowsPerPass];
    for (uint r = 0; r < kRowsPerPass; r++) {
      rest[r] = 0.0f;
      for (uint i = 0; i < kPartials; i++) sum[r][i] = 0.0f;
    }
    for (uint block = part; block < blocks; block += lanes) {
      if (!one_block) activations = load_activations(x + block * kBlock);
      for (uint r = 0; r < kRowsPerPass; r++)              // rows past the end repeat the last one and are not stored
        matrix.accumulate(first + min(row + r, n - 1), block, activations, sum[r], rest[r]);
    }
    const float4 total = float4(row_sum(sum[0]), row_sum(sum[1]), row_sum(sum[2]), row_sum(sum[3])) + float4(rest[0], rest[1], rest[2], rest[3]);
    if (lanes == 32) {
      const float4 values = simd_sum(total);
      if (lane < kRowsPerPass && row + lane < n) y[row + lane] = Out(values[lane]);
    } else {
      threadgroup float4* totals = scratch + (pass & 1) * (kPassScratch / 4);
      threadgroup const float* partial = (threadgroup const float*)totals;
      totals[(part * rows + row_in_pass) / 4] = total;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      for (uint r = lane; r < rows; r += 32) {
        float value = 0.0f;
        for (uint p = 0; p < lanes; p++) value += partial[p * rows + r];
        if (pass * rows + r < n) y[pass * rows + r] = Out(value);
      }
    }
  }
}

// Every projection, the router and the head in decode, one row of x per grid.y.
template <typename Out, int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void gemv(
    device const uint4* w [[buffer(0)]],
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* x [[buffer(3)]],
    device Out* y [[buffer(4)]],
    constant GemvArgs& args [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 scratch[kScratch / 4 * kGemvThreads / 32];
  const QuantMatrix<BITS, GROUP> matrix{w, scales, biases, args.k / kBlock};
  multiply_rows(matrix, x + group.y * args.ldx, y + group.y * args.ldy, 0, args.n, scratch + simdgroup * (kScratch / 4), group.x * simdgroups + simdgroup, groups.x * simdgroups, lane);
}

// The same for tensors a checkpoint leaves in bf16 (router, shared_expert_gate, in_proj_a, in_proj_b).
template <typename Out>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void gemv_dense(
    device const bfloat* w [[buffer(0)]],
    device const bfloat* x [[buffer(3)]],
    device Out* y [[buffer(4)]],
    constant GemvArgs& args [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 scratch[kScratch / 4 * kGemvThreads / 32];
  const DenseMatrix matrix{w, args.k / kBlock};
  multiply_rows(matrix, x + group.y * args.ldx, y + group.y * args.ldy, 0, args.n, scratch + simdgroup * (kScratch / 4), group.x * simdgroups + simdgroup, groups.x * simdgroups, lane);
}

// Experts in decode: grid.y is a (row, slot) pair, whose expert id picks the matrix. The shared expert is one more
// expert, so routed and shared rows are one launch; an unchosen expert's weights are never read.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void moe_gemv(
    device const uint4* w [[buffer(0)]],          // [experts, n, k] packed
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* x [[buffer(3)]],
    device bfloat* y [[buffer(4)]],               // [rows * slots, ldy]
    constant MoeGemvArgs& args [[buffer(5)]],
    device const uint* expert_ids [[buffer(6)]],  // [rows * slots]
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 scratch[kScratch / 4 * kGemvThreads / 32];
  const uint expert = expert_ids[group.y];
  if (expert >= args.experts) return;             // an expert kept elsewhere, in another format
  const QuantMatrix<BITS, GROUP> matrix{w, scales, biases, args.k / kBlock};
  const uint x_row = args.per_slot ? group.y : group.y / args.slots;
  multiply_rows(matrix, x + x_row * args.ldx, y + group.y * args.ldy, expert * args.n, args.n, scratch + simdgroup * (kScratch / 4),
                group.x * simdgroups + simdgroup, groups.x * simdgroups, lane);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
#define INSTANTIATE_QUANT(bits, group)                                        \
  INSTANTIATE("gemv_bf16_b" #bits "_g" #group, gemv, bfloat, bits, group)     \
  INSTANTIATE("gemv_f32_b" #bits "_g" #group, gemv, float, bits, group)       \
  INSTANTIATE("moe_gemv_bf16_b" #bits "_g" #group, moe_gemv, bits, group)

INSTANTIATE_QUANT(4, 32)
INSTANTIATE_QUANT(4, 64)
INSTANTIATE_QUANT(4, 128)
INSTANTIATE_QUANT(8, 32)
INSTANTIATE_QUANT(8, 64)
INSTANTIATE_QUANT(8, 128)
INSTANTIATE("gemv_bf16_w16", gemv_dense, bfloat)
INSTANTIATE("gemv_f32_w16", gemv_dense, float)
