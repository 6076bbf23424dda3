// Matrix tiles on Metal 4 tensor operations (P6): one matmul2d of the whole threadgroup per step. Compiled as language version 4.0 and
// used only where the device has matrix hardware and the self-test passed (policy.py, Capabilities.tensor_ops).
#pragma once
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include "tile.h"

// TileThreads: kTileThreads, or 32 for a processor that runs threads one after another: it starts and switches fewer of them, which read
// more each. Its tiles stay 64 columns wide, since one thread holds all sums.
template <uint TileThreads>
struct TensorTile {
  static METAL_FUNC constexpr uint threads() { return TileThreads; }
  static METAL_FUNC constexpr uint columns(uint rows) { return TileThreads == 32 ? 64 : tile_columns(rows); }

  // The next step's operands are on their way from device memory while this step multiplies. The caller puts a barrier behind it.
  template <uint ROWS, typename Operands>
  static METAL_FUNC void product(thread Operands& operands, uint k, threadgroup bfloat* x, threadgroup bfloat* w, threadgroup float* results, uint) {
    constexpr uint kColumns = columns(ROWS);
    using Extents = dextents<int, 2>;
    using Strides = array<int, 2>;
    using Operand = tensor<threadgroup bfloat, Extents, tensor_inline>;
    constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(ROWS, kColumns, kTileDepth, false, true, false,
                                                                     mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate);
    mpp::tensor_ops::matmul2d<descriptor, execution_simdgroups<TileThreads / 32>> multiply;
    Operand left(x, Extents(kTileDepth, ROWS), Strides{1, int(kOperandStride)});       // innermost extent first
    Operand right(w, Extents(kTileDepth, kColumns), Strides{1, int(kOperandStride)});
    auto sum = multiply.template get_destination_cooperative_tensor<Operand, Operand, float>();
    #pragma unroll
    for (ushort i = 0; i < sum.get_capacity(); i++)
      if (sum.is_valid_element(i)) sum[i] = 0.0f;

    operands.fetch(0);
    for (uint depth = 0; depth < k; depth += kTileDepth) {
      operands.place();
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (depth + kTileDepth < k) operands.fetch(depth + kTileDepth);
      multiply.run(left, right, sum);
      threadgroup_barrier(mem_flags::mem_threadgroup);     // operands are used up
    }
    tensor<threadgroup float, Extents, tensor_inline> target(results, Extents(kColumns, ROWS), Strides{1, int(result_stride(ROWS, kColumns))});
    sum.store(target);
  }
};
using TensorUnit = TensorTile<kTileThreads>;
using SoloTensorUnit = TensorTile<32>;
