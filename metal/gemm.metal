// Matrix times many activation rows: every projection of the prefill phase outside the experts (P1).
#include <metal_stdlib>
#include "common.h"
#include "quant.h"
#include "tile.h"
using namespace metal;

constant constexpr uint kGemmRows = 32;   // rows of x per tile; grid = (ceil(n / kTileColumns), ceil(rows / kGemmRows))

template <typename Matrix, typename Out>
METAL_FUNC void gemm_tile(thread const Matrix& matrix, device const bfloat* x, device Out* y, constant GemmArgs& args, uint2 group,
                          threadgroup float4* memory, uint thread_id, uint simdgroup) {
  const uint row = group.y * kGemmRows + tile_row<kGemmRows>(thread_id);
  multiply_tile<kGemmRows>(matrix, 0, args.n, group.x * kTileColumns, args.k, x + row * args.ldx, y + row * args.ldy, row < args.rows, memory, thread_id, simdgroup);
}

template <typename Out, int BITS, int GROUP>
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
  threadgroup float4 memory[tile_memory(kGemmRows)];
  const QuantMatrix<BITS, GROUP> matrix{w, scales, biases, args.k / kBlock};
  gemm_tile(matrix, x, y, args, uint2(group.x, group.y), memory, thread_id, simdgroup);
}

// The same for tensors a checkpoint leaves in bf16.
template <typename Out>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void gemm_dense(
    device const bfloat* w [[buffer(0)]],
    device const bfloat* x [[buffer(3)]],
    device Out* y [[buffer(4)]],
    constant GemmArgs& args [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 memory[tile_memory(kGemmRows)];
  const DenseMatrix matrix{w, args.k / kBlock};
  gemm_tile(matrix, x, y, args, uint2(group.x, group.y), memory, thread_id, simdgroup);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
#define INSTANTIATE_QUANT(bits, group)                                    \
  INSTANTIATE("gemm_bf16_b" #bits "_g" #group, gemm, bfloat, bits, group) \
  INSTANTIATE("gemm_f32_b" #bits "_g" #group, gemm, float, bits, group)

INSTANTIATE_QUANT(4, 32)
INSTANTIATE_QUANT(4, 64)
INSTANTIATE_QUANT(4, 128)
INSTANTIATE_QUANT(8, 32)
INSTANTIATE_QUANT(8, 64)
INSTANTIATE_QUANT(8, 128)
INSTANTIATE("gemm_bf16_w16", gemm_dense, bfloat)
INSTANTIATE("gemm_f32_w16", gemm_dense, float)
