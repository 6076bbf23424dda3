// The matrix tile every GEMM is built from: Y[m, n] = X[m, k] W[n, k]^T with bf16 operands in threadgroup memory and f32
// accumulators in registers (P1, P3). This file moves operands and results; the product is the work of a unit:
// SimdgroupUnit (tile_simdgroup.h) or, behind a capability, TensorUnit (tile_tensor.h, P6). A unit says how many threads it takes and
// how many columns its tiles have.
#pragma once
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kTileDepth = 64;       // k per step; every row length is a multiple of it
constant constexpr uint kTileThreads = 128;    // four simdgroups; one in tiles for a processor that runs threads one after another
constant constexpr uint kOperandStride = kTileDepth + 8;   // 16 bytes of padding spread a column over the banks
constant constexpr uint kTileMemory = 32768;   // threadgroup memory of every Apple GPU, in bytes
constant constexpr uint kResults = 8;          // that a thread writes at a time: one 16-byte store of bf16

// Outputs of a tile of `rows` rows; grid.x = ceil(n / tile_columns). Tiles of 16 and 32 rows are Apple's (14 KB, several a core);
// the larger one reuses each operand twice as often and is for GPUs with more matrix rate per byte (policy.py, Tuning).
constexpr uint tile_columns(uint rows) { return rows > 32 ? 128 : 64; }
// Row stride of the results: padded where the padding fits.
constexpr uint result_stride(uint rows, uint columns) { return rows * (columns + 4) * 4 > kTileMemory ? columns : columns + 4; }
// Threadgroup memory of a tile, in float4s; operands and results share it: the result is written after the last multiply.
constexpr uint tile_memory(uint rows, uint columns) {
  const uint operands = (rows + columns) * kOperandStride * 2, results = rows * result_stride(rows, columns) * 4;
  return (operands > results ? operands : results) / 16;
}

// Rows of x behind a tile's rows: first, first + 1 ... or, gathered, what sorted_rows holds there divided by gather_slots.
struct TileRows {
  device const bfloat* x;
  uint ldx, first, rows;                                   // rows: that the tile has; those of padding repeat the last and are never stored
  device const uint* sorted_rows;
  uint gather_slots;                                       // 0: not gathered

  METAL_FUNC device const bfloat* row(uint i) const {
    uint at = first + min(i, rows - 1);
    if (gather_slots) at = sorted_rows[at] / gather_slots;
    return x + ulong(at) * ldx;
  }
};

// What one of THREADS threads moves in a step: 16 bytes of every (THREADS / 8)th row of x, and half a step's depth of every
// (THREADS / 2)th weight row. `fetch` reads device memory into registers, `place` puts them into threadgroup memory, weights
// expanded to bf16 on the way (P1): the expanded matrix never exists anywhere else.
template <uint THREADS, uint ROWS, uint COLUMNS, typename Matrix>
struct TileOperands {
  Matrix matrix;
  device const bfloat* x_row[ROWS * 8 / THREADS];
  uint weight_row[COLUMNS * 2 / THREADS];
  uint block;                                              // which half
  threadgroup bfloat* x_to;
  threadgroup bfloat* w_to;
  uint4 x[ROWS * 8 / THREADS];
  typename Matrix::Block w[COLUMNS * 2 / THREADS];
  typename Matrix::Scales scales[COLUMNS * 2 / THREADS];

  METAL_FUNC void fetch(uint depth) {
    #pragma unroll
    for (uint i = 0; i < ROWS * 8 / THREADS; i++) x[i] = *(device const uint4*)(x_row[i] + depth);
    #pragma unroll
    for (uint i = 0; i < COLUMNS * 2 / THREADS; i++) {
      typename Matrix::Scales near = scales[i];
      w[i] = matrix.load(weight_row[i], depth / 32 + block, near);
      scales[i] = near;
    }
  }
  METAL_FUNC void place() const {
    #pragma unroll
    for (uint i = 0; i < ROWS * 8 / THREADS; i++) *(threadgroup uint4*)(x_to + i * (THREADS / 8) * kOperandStride) = x[i];
    #pragma unroll
    for (uint i = 0; i < COLUMNS * 2 / THREADS; i++) matrix.expand(w[i], w_to + i * (THREADS / 2) * kOperandStride);
  }
};

// One tile of Y by the unit's threads. Weight row i of the tile is matrix row first + (i < half ? 0 : second) + min(column + i % half, n - 1):
// columns past the end repeat the last and are not stored. Returns the results, ROWS rows of result_stride.
template <typename Unit, uint ROWS, typename Matrix>
METAL_FUNC threadgroup const float* compute_tile(thread const Matrix& matrix, uint first, uint second, uint half_tile, uint n, uint column, uint k,
                                                 thread const TileRows& rows, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  threadgroup bfloat* x_tile = (threadgroup bfloat*)memory;
  threadgroup bfloat* w_tile = x_tile + ROWS * kOperandStride;
  constexpr uint kThreads = Unit::threads();
  TileOperands<kThreads, ROWS, Unit::columns(ROWS), Matrix> operands;
  operands.matrix = matrix;
  #pragma unroll
  for (uint i = 0; i < ROWS * 8 / kThreads; i++) operands.x_row[i] = rows.row(thread_id / 8 + kThreads / 8 * i) + thread_id % 8 * 8;
  #pragma unroll
  for (uint i = 0; i < Unit::columns(ROWS) * 2 / kThreads; i++) {
    const uint row = thread_id / 2 + kThreads / 2 * i;
    operands.weight_row[i] = first + (row < half_tile ? 0 : second) + min(column + row % half_tile, n - 1);
  }
  operands.block = thread_id % 2;
  operands.x_to = x_tile + thread_id / 8 * kOperandStride + thread_id % 8 * 8;
  operands.w_to = w_tile + thread_id / 2 * kOperandStride + operands.block * 32;
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

// The tile at `column` of a matrix whose rows are first .. first + n, written to as many rows of y as the tile has; padding is never written.
template <typename Unit, uint ROWS, typename Matrix, typename Out>
METAL_FUNC void multiply_tile(thread const Matrix& matrix, uint first, uint n, uint column, uint k, thread const TileRows& rows,
                              device Out* y, uint ldy, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kColumns = Unit::columns(ROWS), kStride = result_stride(ROWS, kColumns);
  threadgroup const float* results = compute_tile<Unit, ROWS>(matrix, first, 0, kColumns, n, column, k, rows, memory, thread_id, simdgroup);
  for (uint i = thread_id; i < ROWS * kColumns / kResults; i += Unit::threads()) {
    const uint row = i / (kColumns / kResults), at = i % (kColumns / kResults) * kResults;
    if (row >= rows.rows) return;
    float value[kResults];
    for (uint j = 0; j < kResults; j++) value[j] = results[row * kStride + at + j];
    store_results(y + ulong(row) * ldy, ldy, n, column + at, value);
  }
}

// Gate and up projections with the gated activation: the matrix holds n gate rows, then n up rows; a tile computes half its columns
// of either at `column`, so that their products meet in it. y = silu(gate) * up, tile_columns / 2 columns a tile.
template <typename Unit, uint ROWS, typename Matrix, typename Out>
METAL_FUNC void gated_tile(thread const Matrix& matrix, uint first, uint n, uint column, uint k, thread const TileRows& rows,
                           device Out* y, uint ldy, threadgroup float4* memory, uint thread_id, uint simdgroup) {
  constexpr uint kHalf = Unit::columns(ROWS) / 2, kStride = result_stride(ROWS, 2 * kHalf);
  threadgroup const float* results = compute_tile<Unit, ROWS>(matrix, first, n, kHalf, n, column, k, rows, memory, thread_id, simdgroup);
  for (uint i = thread_id; i < ROWS * kHalf / kResults; i += Unit::threads()) {
    const uint row = i / (kHalf / kResults), at = i % (kHalf / kResults) * kResults;
    if (row >= rows.rows) return;
    threadgroup const float* gate = results + row * kStride + at;
    threadgroup const float* up = gate + kHalf;
    float value[kResults];
    for (uint j = 0; j < kResults; j++) value[j] = gate[j] / (1.0f + exp(-gate[j])) * up[j];
    store_results(y + ulong(row) * ldy, ldy, n, column + at, value);
  }
}
