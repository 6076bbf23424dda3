// The matrix tile every GEMM is built from: Y[m, n] = X[m, k] W[n, k]^T with bf16 operands in threadgroup memory and f32
// accumulators in registers (P1, P3). This file moves operands and results; the product is the work of a unit:
// SimdgroupUnit (tile_simdgroup.h) or, behind a capability, TensorUnit (tile_tensor.h, P6).
#pragma once
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kTileDepth = 64;       // k per step; every row length is a multiple of it
constant constexpr uint kTileThreads = 128;    // four simdgroups
constant constexpr uint kOperandStride = kTileDepth + 8;   // 16 bytes of padding spread a column over the banks
constant constexpr uint kTileMemory = 32768;   // threadgroup memory of every Apple GPU, in bytes
constant constexpr uint kResults = 8;          // that a thread writes at a time: one 16-byte store of bf16

// Outputs of a tile of `rows` rows; grid.x = ceil(n / tile_columns). Tiles of 16 and 32 rows are Apple's (20 KB, several a core);
// the larger one reuses each operand twice as often and is for GPUs with more matrix rate per byte (policy.py, Tuning).
constexpr uint tile_columns(uint rows) { return rows > 32 ? 128 : 64; }
// Row stride of the results: padded where the padding fits.
constexpr uint result_stride(uint rows, uint columns) { return rows * (columns + 4) * 4 > kTileMemory ? columns : columns + 4; }
// Threadgroup memory of a tile, in float4s; operands and results share it: the result is written after the last multiply.
constexpr uint tile_memory(uint rows) {
  const uint columns = tile_columns(rows), operands = (rows + columns) * kOperandStride * 2, results = rows * result_stride(rows, columns) * 4;
  return (operands > results ? operands : results) / 16;
}

// Which row of the tile a thread moves, and its place among the threads of that row.
template <uint ROWS>
METAL_FUNC uint tile_row(uint thread_id) { return thread_id / (kTileThreads / ROWS); }
template <uint ROWS>
METAL_FUNC uint tile_part(uint thread_id) { return thread_id % (kTileThreads / ROWS); }

// What one thread moves in a step: its part of a row of x, and half a step's depth of one weight row in 64. `fetch` reads device
// memory into registers, `place` puts them into threadgroup memory, weights expanded to bf16 on the way (P1): the expanded matrix
// never exists anywhere else. Rows of padding are zero as operands.
template <uint ROWS, typename Matrix>
struct TileOperands {
  Matrix matrix;
  device const bfloat* x_row;                              // the row that this thread moves (tile_row<ROWS>), if the tile has it
  bool has_row;
  uint part, block;
  threadgroup bfloat* x_to;
  threadgroup bfloat* w_to;
  uint weight_row[tile_columns(ROWS) / 64];                // matrix rows behind the tile's rows thread_id / 2 + 64 i
  uint4 x[kTileDepth * ROWS / 8 / kTileThreads];
  typename Matrix::Block w[tile_columns(ROWS) / 64];

  METAL_FUNC void fetch(uint depth) {
    constexpr uint kVectors = kTileDepth * ROWS / 8 / kTileThreads, kPieces = tile_columns(ROWS) / 64;
    if (has_row) {
      device const uint4* from = (device const uint4*)(x_row + depth) + part * kVectors;
      #pragma unroll
      for (uint i = 0; i < kVectors; i++) x[i] = from[i];
    }
    #pragma unroll
    for (uint i = 0; i < kPieces; i++) w[i] = matrix.load(weight_row[i], depth / 32 + block);
  }
  METAL_FUNC void place() const {
    constexpr uint kVectors = kTileDepth * ROWS / 8 / kTileThreads, kPieces = tile_columns(ROWS) / 64;
    threadgroup uint4* to = (threadgroup uint4*)x_to + part * kVectors;
    #pragma unroll
    for (uint i = 0; i < kVectors; i++) to[i] = x[i];
    #pragma unroll
    for (uint i = 0; i < kPieces; i++) matrix.expand(w[i], w_to + i * 64 * kOperandStride);
  }
};

// One tile of Y by kTileThreads threads. Weight row i of the tile is matrix row first + (i < half ? 0 : second) + min(column + i % half, n - 1):
// columns past the end repeat the last and are not stored. Returns the results, ROWS rows of result_stride.
template <typename Unit, uint ROWS, typename Matrix>
METAL_FUNC threadgroup const float* compute_tile(thread const Matrix& matrix, uint first, uint second, uint half_tile, uint n, uint column, uint k,
                                                 device const bfloat* x_row, bool has_row, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kColumns = tile_columns(ROWS);
  threadgroup bfloat* x_tile = (threadgroup bfloat*)memory;
  threadgroup bfloat* w_tile = x_tile + ROWS * kOperandStride;
  TileOperands<ROWS, Matrix> operands;
  operands.matrix = matrix;
  operands.x_row = x_row;
  operands.has_row = has_row;
  operands.part = tile_part<ROWS>(thread_id);
  operands.block = thread_id % 2;
  operands.x_to = x_tile + tile_row<ROWS>(thread_id) * kOperandStride;
  operands.w_to = w_tile + thread_id / 2 * kOperandStride + operands.block * 32;
  #pragma unroll
  for (uint i = 0; i < kColumns / 64; i++) {
    const uint row = thread_id / 2 + 64 * i;
    operands.weight_row[i] = first + (row < half_tile ? 0 : second) + min(column + row % half_tile, n - 1);
  }
  #pragma unroll
  for (uint i = 0; i < kTileDepth * ROWS / 8 / kTileThreads; i++) operands.x[i] = uint4(0);
  threadgroup float* results = (threadgroup float*)memory;
  Unit::template product<ROWS>(operands, k, x_tile, w_tile, results, simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return results;
}

template <typename Out>
struct alignas(16) ResultChunk {
  Out value[kResults];
};

// Columns column .. column + 8 of a row, as far as the row has them. Rows whose stride is a multiple of 8 elements are aligned to 16 bytes.
template <typename Out>
METAL_FUNC void store_results(device Out* y_row, uint ldy, uint n, uint column, thread const float* value) {
  if (ldy % kResults == 0 && column + kResults <= n) {
    ResultChunk<Out> chunk;
    for (uint i = 0; i < kResults; i++) chunk.value[i] = Out(value[i]);
    *(device ResultChunk<Out>*)(y_row + column) = chunk;
  } else {
    for (uint i = 0; i < min(kResults, n - min(n, column)); i++) y_row[column + i] = Out(value[i]);
  }
}

// The tile at `column` of a matrix whose rows are first .. first + n, written to `rows` rows of y; padding is never written.
template <typename Unit, uint ROWS, typename Matrix, typename Out>
METAL_FUNC void multiply_tile(thread const Matrix& matrix, uint first, uint n, uint column, uint k, device const bfloat* x_row, bool has_row,
                              device Out* y, uint ldy, uint rows, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kColumns = tile_columns(ROWS), kStride = result_stride(ROWS, kColumns);
  threadgroup const float* results = compute_tile<Unit, ROWS>(matrix, first, 0, kColumns, n, column, k, x_row, has_row, memory, thread_id, simdgroup);
  for (uint i = thread_id; i < ROWS * kColumns / kResults; i += kTileThreads) {
    const uint row = i / (kColumns / kResults), at = i % (kColumns / kResults) * kResults;
    if (row >= rows) return;
    float value[kResults];
    for (uint j = 0; j < kResults; j++) value[j] = results[row * kStride + at + j];
    store_results(y + ulong(row) * ldy, ldy, n, column + at, value);
  }
}

// Gate and up projections with the gated activation: the matrix holds n gate rows, then n up rows; a tile computes half its columns
// of either at `column`, so that their products meet in it. y = silu(gate) * up, tile_columns / 2 columns a tile.
template <typename Unit, uint ROWS, typename Matrix, typename Out>
METAL_FUNC void gated_tile(thread const Matrix& matrix, uint first, uint n, uint column, uint k, device const bfloat* x_row, bool has_row,
                           device Out* y, uint ldy, uint rows, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kHalf = tile_columns(ROWS) / 2, kStride = result_stride(ROWS, tile_columns(ROWS));
  threadgroup const float* results = compute_tile<Unit, ROWS>(matrix, first, n, kHalf, n, column, k, x_row, has_row, memory, thread_id, simdgroup);
  for (uint i = thread_id; i < ROWS * kHalf / kResults; i += kTileThreads) {
    const uint row = i / (kHalf / kResults), at = i % (kHalf / kResults) * kResults;
    if (row >= rows) return;
    threadgroup const float* gate = results + row * kStride + at;
    threadgroup const float* up = gate + kHalf;
    float value[kResults];
    for (uint j = 0; j < kResults; j++) value[j] = gate[j] / (1.0f + exp(-gate[j])) * up[j];
    store_results(y + ulong(row) * ldy, ldy, n, column + at, value);
  }
}
