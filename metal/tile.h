// The matrix tile every GEMM is built from: Y[m, n] += X[m, k] W[n, k]^T with bf16 operands in threadgroup memory
// and f32 accumulators in registers, on simdgroup matrices (P1, P3). Nothing outside this file names the unit used.
#pragma once
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kTileColumns = 64;     // outputs per tile; grid.x = ceil(n / kTileColumns)
constant constexpr uint kTileDepth = 64;       // k per step; every row length is a multiple of it
constant constexpr uint kTileThreads = 128;    // four simdgroups
constant constexpr uint kOperandStride = kTileDepth + 8;   // 16 bytes of padding spread a column over the banks
constant constexpr uint kResultStride = kTileColumns + 4;

// One simdgroup's share: all ROWS rows of 16 columns, so that each piece of W is loaded by one simdgroup only.
template <uint ROWS>
struct TileAccumulator {
  simdgroup_matrix<float, 8, 8> sum[ROWS / 8][2];

  METAL_FUNC void clear() {
    for (uint i = 0; i < ROWS / 8; i++)
      for (uint j = 0; j < 2; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  // x: ROWS rows of kOperandStride; w: this simdgroup's 16 rows of kOperandStride. The caller has put a barrier before.
  METAL_FUNC void multiply(threadgroup const bfloat* x, threadgroup const bfloat* w) {
    for (uint k = 0; k < kTileDepth; k += 8) {
      simdgroup_matrix<bfloat, 8, 8> right[2];
      for (uint j = 0; j < 2; j++) simdgroup_load(right[j], w + j * 8 * kOperandStride + k, kOperandStride, ulong2(0), true);
      for (uint i = 0; i < ROWS / 8; i++) {
        simdgroup_matrix<bfloat, 8, 8> left;
        simdgroup_load(left, x + i * 8 * kOperandStride + k, kOperandStride);
        for (uint j = 0; j < 2; j++) simdgroup_multiply_accumulate(sum[i][j], left, right[j], sum[i][j]);
      }
    }
  }
  // To ROWS rows of kResultStride at this simdgroup's 16 columns; a barrier before other threads read.
  METAL_FUNC void store(threadgroup float* result) {
    for (uint i = 0; i < ROWS / 8; i++)
      for (uint j = 0; j < 2; j++) simdgroup_store(sum[i][j], result + i * 8 * kResultStride + j * 8, kResultStride);
  }
};

// Threadgroup memory of a tile, in float4s; operands and result share it: the result is written after the last multiply.
constexpr uint tile_memory(uint rows) {
  return ((rows + kTileColumns) * kOperandStride * 2 > rows * kResultStride * 4 ? (rows + kTileColumns) * kOperandStride * 2 : rows * kResultStride * 4) / 16;
}

// Which row of the tile a thread moves, and its place among the threads of that row.
template <uint ROWS>
METAL_FUNC uint tile_row(uint thread_id) { return thread_id / (kTileThreads / ROWS); }
template <uint ROWS>
METAL_FUNC uint tile_part(uint thread_id) { return thread_id % (kTileThreads / ROWS); }
// Which of the tile's 64 weight rows a thread expands, half a step's depth each.
METAL_FUNC uint tile_weight_row(uint thread_id) { return thread_id / 2; }

// One ROWS x 64 tile of Y by kTileThreads threads (P1): each step expands a 64 x 64 piece of packed weights into
// threadgroup memory as bf16, just before it is multiplied; the expanded matrix never exists anywhere else.
// weight_row is the matrix row behind this thread's tile_weight_row. x_row is the row that this thread moves (tile_row<ROWS>),
// has_row whether the tile has it: rows of padding are zero as operands. Returns the results, ROWS rows of kResultStride.
template <uint ROWS, typename Matrix>
METAL_FUNC threadgroup const float* compute_tile(thread const Matrix& matrix, uint weight_row, uint k, device const bfloat* x_row, bool has_row,
                                                 threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kVectors = kTileDepth / 8 / (kTileThreads / ROWS);   // 16-byte pieces of x per thread and step
  threadgroup bfloat* x_tile = (threadgroup bfloat*)memory;
  threadgroup bfloat* w_tile = x_tile + ROWS * kOperandStride;
  const uint part = tile_part<ROWS>(thread_id), w_block = thread_id % 2;
  threadgroup uint4* x_to = (threadgroup uint4*)(x_tile + tile_row<ROWS>(thread_id) * kOperandStride) + part * kVectors;
  threadgroup bfloat* w_to = w_tile + tile_weight_row(thread_id) * kOperandStride + w_block * 32;

  if (!has_row)
    for (uint i = 0; i < kVectors; i++) x_to[i] = uint4(0);
  TileAccumulator<ROWS> accumulator;
  accumulator.clear();
  for (uint depth = 0; depth < k; depth += kTileDepth) {
    if (has_row) {
      device const uint4* x_from = (device const uint4*)(x_row + depth) + part * kVectors;
      for (uint i = 0; i < kVectors; i++) x_to[i] = x_from[i];
    }
    matrix.expand(weight_row, depth / 32 + w_block, w_to);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    accumulator.multiply(x_tile, w_tile + simdgroup * 16 * kOperandStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);              // operands are used up
  }
  threadgroup float* results = (threadgroup float*)memory;
  accumulator.store(results + simdgroup * 16);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return results;
}

// The tile at `column` of a matrix whose rows are first .. first + n, written to y_row; padding is never written.
template <uint ROWS, typename Matrix, typename Out>
METAL_FUNC void multiply_tile(thread const Matrix& matrix, uint first, uint n, uint column, uint k, device const bfloat* x_row, device Out* y_row, bool has_row,
                              threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kResults = kTileColumns / (kTileThreads / ROWS);
  const uint weight_row = first + min(column + tile_weight_row(thread_id), n - 1);   // columns past the end repeat the last, unstored
  threadgroup const float* results = compute_tile<ROWS>(matrix, weight_row, k, x_row, has_row, memory, thread_id, simdgroup);
  if (!has_row) return;
  const uint part = tile_part<ROWS>(thread_id);
  threadgroup const float* result = results + tile_row<ROWS>(thread_id) * kResultStride + part * kResults;
  const uint left = min(kResults, n - min(n, column + part * kResults));
  for (uint i = 0; i < left; i++) y_row[column + part * kResults + i] = Out(result[i]);
}

// Gate and up projections with the gated activation: the matrix holds n gate rows, then n up rows; a tile computes the 32 of either
// at `column`, so that their products meet in it. y = silu(gate) * up, 32 columns a tile.
constant constexpr uint kGatedColumns = kTileColumns / 2;

template <uint ROWS, typename Matrix, typename Out>
METAL_FUNC void gated_tile(thread const Matrix& matrix, uint first, uint n, uint column, uint k, device const bfloat* x_row, device Out* y_row, bool has_row,
                           threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kResults = kGatedColumns / (kTileThreads / ROWS);
  const uint w_row = tile_weight_row(thread_id);
  const uint weight_row = first + (w_row < kGatedColumns ? 0 : n) + min(column + w_row % kGatedColumns, n - 1);
  threadgroup const float* results = compute_tile<ROWS>(matrix, weight_row, k, x_row, has_row, memory, thread_id, simdgroup);
  if (!has_row) return;
  const uint part = tile_part<ROWS>(thread_id);
  threadgroup const float* gate = results + tile_row<ROWS>(thread_id) * kResultStride + part * kResults;
  threadgroup const float* up = gate + kGatedColumns;
  const uint left = min(kResults, n - min(n, column + part * kResults));
  for (uint i = 0; i < left; i++) y_row[column + part * kResults + i] = Out(gate[i] / (1.0f + exp(-gate[i])) * up[i]);
}
