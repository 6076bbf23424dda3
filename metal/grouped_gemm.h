// All experts of a layer in prefill, as one launch over the block map of routing.metal (P1, P2, P3): the kernels, for the unit that
// multiplies (P6). Their families are grouped_gemm.metal, grouped_gemm_tensor.metal and grouped_gemm_solo_tensor.metal.
#pragma once
#include <metal_stdlib>
#include "common.h"
#include "quant.h"
#include "tile.h"
using namespace metal;

// One tile of one expert: the block map names the expert and its rows, so no tile of the grid is wasted on an expert
// without rows; entries past the last block hold an expert beyond the end and leave at once. P3: large tiles where
// experts have rows enough, small ones where most of a larger tile would be padding; the host picks by mean rows, or
// launches both over the two maps of route_plan_split.
// grid = (ceil(n / Unit::columns), max_blocks); gated: n outputs of 2 n rows an expert, grid.x = ceil(n / (Unit::columns / 2)).
template <typename Unit, uint ROWS, bool GATED, typename Matrix>
METAL_FUNC void grouped_tile(thread const Matrix& matrix, device const bfloat* x, device bfloat* y, constant GroupedGemmArgs& args, uint4 block,
                             device const uint* sorted_rows, uint column_tile, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kColumns = Unit::columns(ROWS);
  const TileRows rows{x, args.ldx, block.y, block.z, sorted_rows, args.gather_slots};
  y += block.y * args.ldy;
  if (GATED) gated_tile<Unit, ROWS>(matrix, block.x * 2 * args.n, args.n, column_tile * kColumns / 2, args.k, rows, y, args.ldy, memory, thread_id, simdgroup);
  else multiply_tile<Unit, ROWS>(matrix, block.x * args.n, args.n, column_tile * kColumns, args.k, rows, y, args.ldy, memory, thread_id, simdgroup);
}

template <typename Unit, int BITS, int GROUP, uint ROWS, bool GATED>
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
  threadgroup float4 memory[tile_memory(ROWS, Unit::columns(ROWS))];
  const uint4 block = block_map[group.y];
  if (block.x >= args.experts) return;
  const QuantMatrix<BITS, GROUP> matrix{w, scales, biases, args.k / kBlock};
  grouped_tile<Unit, ROWS, GATED>(matrix, x, y, args, block, sorted_rows, group.x, memory, thread_id, simdgroup);
}

// The same over bf16 weights: experts a checkpoint left unquantised, and the control of P1.
template <typename Unit, uint ROWS, bool GATED>
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
  threadgroup float4 memory[tile_memory(ROWS, Unit::columns(ROWS))];
  const uint4 block = block_map[group.y];
  if (block.x >= args.experts) return;
  const DenseMatrix matrix{w, args.k / kBlock};
  grouped_tile<Unit, ROWS, GATED>(matrix, x, y, args, block, sorted_rows, group.x, memory, thread_id, simdgroup);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
// name: the family's; one set of kernels per tile height.
#define INSTANTIATE_QUANT(name, unit, bits, group, rows)                                                            \
  INSTANTIATE(name "_bf16_b" #bits "_g" #group "_m" #rows, grouped_gemm, unit, bits, group, rows, false)            \
  INSTANTIATE(name "_silu_bf16_b" #bits "_g" #group "_m" #rows, grouped_gemm, unit, bits, group, rows, true)
#define INSTANTIATE_ROWS(name, unit, rows)                                                            \
  INSTANTIATE_QUANT(name, unit, 4, 32, rows)                                                          \
  INSTANTIATE_QUANT(name, unit, 4, 64, rows)                                                          \
  INSTANTIATE_QUANT(name, unit, 4, 128, rows)                                                         \
  INSTANTIATE_QUANT(name, unit, 8, 32, rows)                                                          \
  INSTANTIATE_QUANT(name, unit, 8, 64, rows)                                                          \
  INSTANTIATE_QUANT(name, unit, 8, 128, rows)                                                         \
  INSTANTIATE(name "_bf16_w16_m" #rows, grouped_gemm_dense, unit, rows, false)                        \
  INSTANTIATE(name "_silu_bf16_w16_m" #rows, grouped_gemm_dense, unit, rows, true)
