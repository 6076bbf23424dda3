// The control of P1: packed weights expanded to bf16 in a pass of its own, for the w16 matrix kernels to read back. With in-tile
// dequantisation none of this runs; it shows what writing and reading the expanded matrix costs.
#include <metal_stdlib>
#include "common.h"
#include "quant.h"
using namespace metal;

constant constexpr uint kDequantiseThreads = 256;

// A thread expands blocks of 32 weights; blocks of all rows lie one behind the other, so any grid is right: threads stride over them.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kDequantiseThreads)]] void dequantise(
    device const uint4* w [[buffer(0)]],           // [rows, k] packed; rows: of all experts together
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device bfloat* out [[buffer(3)]],              // [rows, k]
    constant DequantiseArgs& args [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]],
    uint threads [[threads_per_grid]]) {
  const uint blocks = args.k / kBlock;
  const QuantMatrix<BITS, GROUP> matrix{w, scales, biases, blocks};
  for (uint block = thread_index; block < args.rows * blocks; block += threads)
    matrix.expand(block / blocks, block % blocks, out + ulong(block) * kBlock);
}

#define INSTANTIATE(bits, group) \
  template [[host_name("dequantise_b" #bits "_g" #group)]] [[kernel]] decltype(dequantise<bits, group>) dequantise<bits, group>;
INSTANTIATE(4, 32)
INSTANTIATE(4, 64)
INSTANTIATE(4, 128)
INSTANTIATE(8, 32)
INSTANTIATE(8, 64)
INSTANTIATE(8, 128)
