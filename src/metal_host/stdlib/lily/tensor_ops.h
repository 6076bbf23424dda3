// <MetalPerformancePrimitives>: matmul2d on the CPU. The columns of the product are shared out among the simdgroups of the scope,
// and lane 0 of each holds and computes its share as vector code; the other lanes own no element. As for simdgroup matrices
// (matrix.h), that is right because kernels put barriers around an operation's operands.
#pragma once
typedef uint lily_words16 __attribute__((ext_vector_type(16)));
typedef lily_words16 lily_packed_words16 __attribute__((aligned(2)));
typedef lily_float16 lily_packed_float16 __attribute__((aligned(4)));

#define LILY_SWAP_OWN(j, s) ((j) & (s) ? 16 + ((j) ^ (s)) : (j))
#define LILY_SWAP_OTHER(j, s) ((j) & (s) ? 16 + (j) : (j) | (s))
#define LILY_SWAP_ALL(f, s) f(0, s), f(1, s), f(2, s), f(3, s), f(4, s), f(5, s), f(6, s), f(7, s), f(8, s), f(9, s), f(10, s), f(11, s), f(12, s), f(13, s), f(14, s), f(15, s)
#define LILY_SWAP_STAGE(s)                                                            \
  LILY_UNROLL for (int i = 0; i < 16; i++)                                            \
    if (!(i & s)) {                                                                   \
      const lily_words16 a = row[i], b = row[i | s];                                  \
      row[i] = __builtin_shufflevector(a, b, LILY_SWAP_ALL(LILY_SWAP_OWN, s));        \
      row[i | s] = __builtin_shufflevector(a, b, LILY_SWAP_ALL(LILY_SWAP_OTHER, s));  \
    }
LILY_INLINE void lily_transpose16(lily_words16 *row) { LILY_SWAP_STAGE(1) LILY_SWAP_STAGE(2) LILY_SWAP_STAGE(4) LILY_SWAP_STAGE(8) }

// Pairs of neighbours in k, as lily_dot_pairs wants them: the instruction takes the upper half first, products are to be added in the
// order of k. So a product has the same bytes as on simdgroup matrices.
LILY_INLINE lily_words16 lily_pairs(lily_words16 w) {
#if __AVX512BF16__
  return w >> 16 | w << 16;
#else
  return w;
#endif
}
// sum[column] += x . w[column] over a pair.
LILY_INLINE lily_float16 lily_dot_pairs(lily_float16 sum, uint x, lily_words16 w) {
#if __AVX512BF16__
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"((lily_words16)(x)));
  return sum;
#else
  const lily_float16 low = __builtin_bit_cast(lily_float16, w << 16), high = __builtin_bit_cast(lily_float16, w & 0xffff0000u);
  sum = __builtin_elementwise_fma((lily_float16)as_type<float>(x << 16), low, sum);
  return __builtin_elementwise_fma((lily_float16)as_type<float>(x & 0xffff0000u), high, sum);
#endif
}

// sum [M][16] += x w [16, K]^T; x: pairs of all rows, [M][K / 2]
template <int M, int K>
LILY_INLINE void lily_multiply_panel(lily_float16 *sum, const uint *x, LILY_LOCAL const bfloat *w, ulong w_stride) {
  constexpr int kPairs = K / 2, kRows = 8;
  lily_words16 panel[kPairs];                                                              // [pair][column]
  for (int part = 0; part < kPairs; part += 16) {
    LILY_UNROLL for (int i = 0; i < 16; i++) panel[part + i] = lily_pairs(*(LILY_LOCAL const lily_packed_words16 *)(w + i * w_stride + part * 2));
    lily_transpose16(panel + part);
  }
  for (int row = 0; row < M; row += kRows) {
    lily_float16 total[kRows];
    LILY_UNROLL for (int i = 0; i < kRows; i++) total[i] = sum[row + i];
    const uint *from = x + row * kPairs;
    for (int pair = 0; pair < kPairs; pair++)
      LILY_UNROLL for (int i = 0; i < kRows; i++) total[i] = lily_dot_pairs(total[i], from[i * kPairs + pair], panel[pair]);
    LILY_UNROLL for (int i = 0; i < kRows; i++) sum[row + i] = total[i];
  }
}

namespace metal {
// What lane 0 of a simdgroup holds of an M x N product: panels of 16 columns, [panel][row][16].
template <class T, int M, int N, int Simdgroups> struct cooperative_tensor {
  static_assert(is_same_v<T, float>, "destinations are float");
  static constexpr __constant int panels = N / Simdgroups / 16;
  static_assert(panels * Simdgroups * 16 == N && M % 8 == 0, "matmul2d: columns are shared out in panels of 16, rows go by 8");
  lily_float16 part[panels * M];
  LILY_INLINE ushort get_capacity() const { return lily_lane() == 0 ? panels * M * 16 : 0; }
  LILY_INLINE bool is_valid_element(ushort i) const { return i < get_capacity(); }
  LILY_INLINE float &operator[](ushort i) { return ((__private float *)part)[i]; }
  LILY_INLINE float operator[](ushort i) const { return ((const __private float *)part)[i]; }
  template <class Extents> LILY_INLINE void store(tensor<LILY_LOCAL float, Extents, tensor_inline> &target, LILY_SITE) const {
    LILY_MATRIX_OPERATION(site);
    if (lily_lane() != 0) return;
    LILY_LOCAL float *to = target.data + lily_worker()->simdgroup_index * panels * 16;
    for (int panel = 0; panel < panels; panel++)
      for (int row = 0; row < M; row++) *(LILY_LOCAL lily_packed_float16 *)(to + row * target.stride + panel * 16) = part[panel * M + row];
  }
};
}  // namespace metal

namespace mpp {
namespace tensor_ops {
template <long Descriptor, class Scope> struct matmul2d {
  using Shape = lily_descriptor<Descriptor>;
  using Destination = metal::cooperative_tensor<float, Shape::m, Shape::n, Scope::count>;
  static_assert(Shape::transpose_right && Shape::accumulate, "matmul2d: multiply_accumulate with a transposed right operand is offered");
  static_assert(Shape::k % 32 == 0, "matmul2d: k is a multiple of 32");

  template <class Left, class Right, class T> LILY_INLINE Destination get_destination_cooperative_tensor() const { return Destination(); }

  // destination += left [m, k] right [n, k]^T
  template <class Extents>
  LILY_INLINE void run(metal::tensor<LILY_LOCAL bfloat, Extents, metal::tensor_inline> &left, metal::tensor<LILY_LOCAL bfloat, Extents, metal::tensor_inline> &right,
                       Destination &destination, LILY_SITE) const {
    LILY_MATRIX_OPERATION(site);
#if LILY_STRICT
    if (left.extents.extent(0) != Shape::k || left.extents.extent(1) != Shape::m || right.extents.extent(0) != Shape::k || right.extents.extent(1) != Shape::n)
      lily_engine_table.fail((ulong) "matmul2d: extents of an operand differ from the descriptor");
    if (lily_worker()->simdgroup_index >= Scope::count) lily_engine_table.fail((ulong) "matmul2d: the threadgroup has more simdgroups than the scope");
#endif
    if (lily_lane() != 0) return;
    constexpr int kParts = Shape::k / 32;
    lily_words16 x[Shape::m * kParts];
    for (int row = 0; row < Shape::m; row++)
      LILY_UNROLL for (int i = 0; i < kParts; i++)
        x[row * kParts + i] = lily_pairs(*(LILY_LOCAL const lily_packed_words16 *)(left.data + row * left.stride + i * 32));
    const ulong first = lily_worker()->simdgroup_index * Destination::panels * 16;
    for (int panel = 0; panel < Destination::panels; panel++)
      lily_multiply_panel<Shape::m, Shape::k>((lily_float16 *)destination.part + panel * Shape::m, (const uint *)x,
                                              right.data + (first + panel * 16) * right.stride, right.stride);
  }
};
}  // namespace tensor_ops
}  // namespace mpp
