// Matrix tiles on simdgroup matrices: every Apple GPU since the M1, and the control of P6.
#pragma once
#include "tile.h"

struct SimdgroupUnit {
  static METAL_FUNC constexpr uint threads() { return kTileThreads; }
  static METAL_FUNC constexpr uint columns(uint rows) { return tile_columns(rows); }

  // Each simdgroup computes all ROWS rows of 16 columns, so that each piece of W is loaded by one simdgroup only.
  // The caller puts a barrier behind it.
  template <uint ROWS, typename Operands>
  static METAL_FUNC void product(thread Operands& operands, uint k, threadgroup const bfloat* x, threadgroup const bfloat* w,
                                 threadgroup float* results, uint simdgroup) {
    constexpr uint kStride = result_stride(ROWS, 64);
    static_assert(tile_columns(ROWS) == 64, "four simdgroups share 64 columns");
    simdgroup_matrix<float, 8, 8> sum[ROWS / 8][2];
    for (uint i = 0; i < ROWS / 8; i++)
      for (uint j = 0; j < 2; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    w += simdgroup * 16 * kOperandStride;
    for (uint depth = 0; depth < k; depth += kTileDepth) {
      operands.fetch(depth);
      operands.place();
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint step = 0; step < kTileDepth; step += 8) {
        simdgroup_matrix<bfloat, 8, 8> right[2];
        for (uint j = 0; j < 2; j++) simdgroup_load(right[j], w + j * 8 * kOperandStride + step, kOperandStride, ulong2(0), true);
        for (uint i = 0; i < ROWS / 8; i++) {
          simdgroup_matrix<bfloat, 8, 8> left;
          simdgroup_load(left, x + i * 8 * kOperandStride + step, kOperandStride);
          for (uint j = 0; j < 2; j++) simdgroup_multiply_accumulate(sum[i][j], left, right[j], sum[i][j]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);     // operands are used up
    }
    results += simdgroup * 16;
    for (uint i = 0; i < ROWS / 8; i++)
      for (uint j = 0; j < 2; j++) simdgroup_store(sum[i][j], results + i * 8 * kStride + j * 8, kStride);
  }
};
