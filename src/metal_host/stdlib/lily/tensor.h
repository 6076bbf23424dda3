// <metal_tensor> as far as kernels use it: inline tensors of rank 2 over memory that they do not own, the scopes of a tensor
// operation, and matmul2d's descriptor. The operations are in tensor_ops.h of each device.
#pragma once
namespace metal {
struct tensor_inline {};

// Extents known at run time, innermost first.
template <class Index, size_t Rank> struct dextents {
  static_assert(Rank == 2, "tensors of rank 2 are offered");
  Index size[Rank];
  constexpr LILY_INLINE dextents(Index inner, Index outer) : size{inner, outer} {}
  constexpr LILY_INLINE Index extent(size_t i) const { return size[i]; }
};

template <class Element, class Extents, class Descriptor> struct tensor {
  static_assert(is_same_v<Descriptor, tensor_inline>, "only inline tensors are offered: buffers are bound as plain pointers");
  Element *data;
  Extents extents;
  ulong stride;                                                // elements from one row to the next
  LILY_INLINE tensor(Element *p, Extents e) : data(p), extents(e), stride(e.extent(0)) {}
  LILY_INLINE tensor(Element *p, Extents e, array<int, 2> strides) : data(p), extents(e), stride(strides[1]) {}
};

template <size_t N> struct execution_simdgroups { static constexpr __constant uint count = N; };
using execution_simdgroup = execution_simdgroups<1>;
}  // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int rows, int columns, int depth, bool left = false, bool right = false, bool relaxed = false, mode how = mode::multiply)
      : m(rows), n(columns), k(depth), transpose_left(left), transpose_right(right), relaxed_precision(relaxed), matmul_mode(how) {}
  // As a template argument, which an object of a class cannot be before C++20.
  constexpr operator long() const {
    return (long)m | (long)n << 16 | (long)k << 32 | (long)transpose_left << 48 | (long)transpose_right << 49 | (long)(matmul_mode == mode::multiply_accumulate) << 50;
  }
};

template <long Descriptor> struct lily_descriptor {
  static constexpr __constant int m = Descriptor & 0xffff, n = Descriptor >> 16 & 0xffff, k = Descriptor >> 32 & 0xffff;
  static constexpr __constant bool transpose_right = Descriptor >> 49 & 1, accumulate = Descriptor >> 50 & 1;
  static_assert(m % 16 == 0 || n % 16 == 0, "matmul2d: m or n is a multiple of 16");
  static_assert(m > 0 && n > 0 && k > 0, "matmul2d: sizes known at compile time are offered");
  static_assert(!(Descriptor >> 48 & 1), "matmul2d: a transposed left operand is not offered");
};
}  // namespace tensor_ops
}  // namespace mpp
