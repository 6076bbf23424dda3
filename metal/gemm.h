// Matrix times many activation rows: every projection of the prefill phase outside the experts (P1): the kernels, for the unit that
// multiplies (P6). Their families are gemm.metal, gemm_tensor.metal and gemm_solo_tensor.metal. grid = (ceil(n / Unit::columns), ceil(rows / ROWS))
#pragma once
#include <metal_stdlib>
#include "common.h"
#include "quant.h"
#include "tile.h"
using namespace metal;

template <typename Unit, uint ROWS, typename Matrix, typename Out>
METAL_FUNC void gemm_tile(thread const Matrix& matrix, device const bfloat* x, device Out* y, constant GemmArgs& args, uint2 group,
                          threadgroup float4* memory, uint thread_id, uint simdgroup) {
  const uint first = group.y * ROWS;
  const TileRows rows{x, args.ldx, first, args.rows - first, nullptr, 0};
  multiply_tile<Unit, ROWS>(matrix, 0, args.n, group.x * Unit::columns(ROWS), args.k, rows, y + first * args.ldy, args.ldy, memory, thread_id,
                            simdgroup);
}

template <typename Unit, uint ROWS, typename Out, int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void gemm(
    device const uint4* w [[buffer(0)]],           // [n, k] packed
    device const bfloat* scales [[buffer(1)]],     // [n, k / GROUP]
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* x [[buffer(3)]],          // [rows, ldx]
    device Out* y [[buffer(4)]],                   // [rows, ldy]
    constant GemmArgs& args [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 memory[tile_memory(ROWS, Unit::columns(ROWS))];
  const QuantMatrix<BITS, GROUP> matrix{w, scales, biases, args.k / kBlock};
  gemm_tile<Unit, ROWS>(matrix, x, y, args, uint2(group.x, group.y), memory, thread_id, simdgroup);
}

// The same for tensors a checkpoint leaves in bf16.
template <typename Unit, uint ROWS, typename Out>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void gemm_dense(
    device const bfloat* w [[buffer(0)]],
    device const bfloat* x [[buffer(3)]],
    device Out* y [[buffer(4)]],
    constant GemmArgs& args [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 memory[tile_memory(ROWS, Unit::columns(ROWS))];
  const DenseMatrix matrix{w, args.k / kBlock};
  gemm_tile<Unit, ROWS>(matrix, x, y, args, uint2(group.x, group.y), memory, thread_id, simdgroup);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
#define INSTANTIATE_QUANT(name, unit, rows, bits, group)                                                 \
  INSTANTIATE(name "_bf16_b" #bits "_g" #group "_m" #rows, gemm, unit, rows, bfloat, bits, group)        \
  INSTANTIATE(name "_f32_b" #bits "_g" #group "_m" #rows, gemm, unit, rows, float, bits, group)
#define INSTANTIATE_ROWS(name, unit, rows)                                             \
  INSTANTIATE_QUANT(name, unit, rows, 4, 32)                                           \
  INSTANTIATE_QUANT(name, unit, rows, 4, 64)                                           \
  INSTANTIATE_QUANT(name, unit, rows, 4, 128)                                          \
  INSTANTIATE_QUANT(name, unit, rows, 8, 32)                                           \
  INSTANTIATE_QUANT(name, unit, rows, 8, 64)                                           \
  INSTANTIATE_QUANT(name, unit, rows, 8, 128)                                          \
  INSTANTIATE(name "_bf16_w16_m" #rows, gemm_dense, unit, rows, bfloat)                \
  INSTANTIATE(name "_f32_w16_m" #rows, gemm_dense, unit, rows, float)
