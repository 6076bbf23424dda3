// All experts of a layer in prefill, as one launch over the block map of routing.metal (P1, P2, P3).
// Names: grouped_gemm[_silu]_bf16_{format}_m{rows of a tile}. silu: gate and up projections with the gated activation in the epilogue;
// format w16: the control of P1, weights that dequantise.metal has expanded in a pass of its own.
#include <metal_stdlib>
#include "common.h"
#include "quant.h"
#include "tile.h"
using namespace metal;

// One tile of one expert: the block map names the expert and its rows, so no tile of the grid is wasted on an expert
// without rows; entries past the last block hold an expert beyond the end and leave at once. P3: 32-row tiles where
// experts have rows enough, 16-row tiles where most of a larger tile would be padding; the host picks by mean rows, or
// launches both over the two maps of route_plan_split.
// grid = (ceil(n / kTileColumns), max_blocks); gated: n outputs of 2 n rows an expert, grid.x = ceil(n / kGatedColumns).
template <uint ROWS, bool GATED, typename Matrix>
METAL_FUNC void grouped_tile(thread const Matrix& matrix, device const bfloat* x, device bfloat* y, constant GroupedGemmArgs& args, uint4 block,
                             device const uint* sorted_rows, uint column_tile, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  const uint row = tile_row<ROWS>(thread_id), sorted = block.y + row;
  const bool has_row = row < block.z;
  uint x_row = sorted;
  if (has_row && args.gather_slots) x_row = sorted_rows[sorted] / args.gather_slots;
  x += x_row * args.ldx;
  y += sorted * args.ldy;
  if (GATED) gated_tile<ROWS>(matrix, block.x * 2 * args.n, args.n, column_tile * kGatedColumns, args.k, x, y, has_row, memory, thread_id, simdgroup);
  else multiply_tile<ROWS>(matrix, block.x * args.n, args.n, column_tile * kTileColumns, args.k, x, y, has_row, memory, thread_id, simdgroup);
}

template <int BITS, int GROUP, uint ROWS, bool GATED>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void grouped_gemm(
    device const uint4* w [[buffer(0)]],             // [experts, n, k] packed; gated: [experts, 2 n, k], gate rows before up rows
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* x [[buffer(3)]],
    device bfloat* y [[buffer(4)]],                  // [total, ldy], rows sorted by expert
    constant GroupedGemmArgs& args [[buffer(5)]],
    device const uint4* block_map [[buffer(6)]],     // {expert, first sorted row, rows, 0}
    device const uint* sorted_rows [[buffer(7)]],    // (row, slot) index of each sorted row
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 memory[tile_memory(ROWS)];
  const uint4 block = block_map[group.y];
  if (block.x >= args.experts) return;
  const QuantMatrix<BITS, GROUP> matrix{w, scales, biases, args.k / kBlock};
  grouped_tile<ROWS, GATED>(matrix, x, y, args, block, sorted_rows, group.x, memory, thread_id, simdgroup);
}

// The same over bf16 weights: experts a checkpoint left unquantised, and the control of P1.
template <uint ROWS, bool GATED>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void grouped_gemm_dense(
    device const bfloat* w [[buffer(0)]],
    device const bfloat* x [[buffer(3)]],
    device bfloat* y [[buffer(4)]],
    constant GroupedGemmArgs& args [[buffer(5)]],
    device const uint4* block_map [[buffer(6)]],
    device const uint* sorted_rows [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 memory[tile_memory(ROWS)];
  const uint4 block = block_map[group.y];
  if (block.x >= args.experts) return;
  const DenseMatrix matrix{w, args.k / kBlock};
  grouped_tile<ROWS, GATED>(matrix, x, y, args, block, sorted_rows, group.x, memory, thread_id, simdgroup);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
#define INSTANTIATE_QUANT(bits, group)                                                                   \
  INSTANTIATE("grouped_gemm_bf16_b" #bits "_g" #group "_m32", grouped_gemm, bits, group, 32, false)      \
  INSTANTIATE("grouped_gemm_bf16_b" #bits "_g" #group "_m16", grouped_gemm, bits, group, 16, false)      \
  INSTANTIATE("grouped_gemm_silu_bf16_b" #bits "_g" #group "_m32", grouped_gemm, bits, group, 32, true)  \
  INSTANTIATE("grouped_gemm_silu_bf16_b" #bits "_g" #group "_m16", grouped_gemm, bits, group, 16, true)

INSTANTIATE_QUANT(4, 32)
INSTANTIATE_QUANT(4, 64)
INSTANTIATE_QUANT(4, 128)
INSTANTIATE_QUANT(8, 32)
INSTANTIATE_QUANT(8, 64)
INSTANTIATE_QUANT(8, 128)
INSTANTIATE("grouped_gemm_bf16_w16_m32", grouped_gemm_dense, 32, false)
INSTANTIATE("grouped_gemm_bf16_w16_m16", grouped_gemm_dense, 16, false)
INSTANTIATE("grouped_gemm_silu_bf16_w16_m32", grouped_gemm_dense, 32, true)
INSTANTIATE("grouped_gemm_silu_bf16_w16_m16", grouped_gemm_dense, 16, true)
