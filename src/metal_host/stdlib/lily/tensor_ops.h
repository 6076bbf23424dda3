// <MetalPerformancePrimitives>: matmul2d on the CPU. The columns of the product are shared out among the simdgroups of the scope,
// and lane 0 of each holds and computes its share as vector code; the other lanes own no element. As for simdgroup matrices
// (matrix.h), that is right because kernels put barriers around an operation's operands.
#pragma once
typedef uint lily_words16 __attribute__((ext_vector_type(16)));
typedef lily_words16 lily_packed_words16 __attribute__((aligned(2)));
typedef ushort lily_halves16 __attribute__((ext_vector_type(16)));
typedef lily_halves16 lily_packed_halves16 __attribute__((aligned(2)));
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

// What one pass over k multiplies: as many sums as registers hold. f32 products: vdpbf16ps has half their rate on Intel's cores (Granite
// Rapids: 1.3 G instructions a second against 5.3 G), and so a product has the same bytes as on simdgroup matrices.
#if __AVX512F__
constexpr __constant int lily_block_rows = 8, lily_block_panels = 2;
#else
constexpr __constant int lily_block_rows = 4, lily_block_panels = 1;
#endif

// sum [P][M][16], of one block of rows, += x [rows, K] w [P][16, K]^T; w: pairs of neighbours in k, [P][K / 2][16].
template <int M, int K, int P> __attribute__((min_vector_width(512)))
LILY_INLINE void lily_multiply_block(lily_float16 *sum, const float *x, const lily_words16 *w) {
  lily_float16 total[P][lily_block_rows];
  LILY_UNROLL for (int p = 0; p < P; p++)
    LILY_UNROLL for (int i = 0; i < lily_block_rows; i++) total[p][i] = sum[p * M + i];
  for (int pair = 0; pair < K / 2; pair++) {
    lily_float16 even[P], odd[P];
    LILY_UNROLL for (int p = 0; p < P; p++) {
      const lily_words16 both = w[p * (K / 2) + pair];
      even[p] = __builtin_bit_cast(lily_float16, both << 16);
      odd[p] = __builtin_bit_cast(lily_float16, both & 0xffff0000u);
    }
    LILY_UNROLL for (int i = 0; i < lily_block_rows; i++)
      LILY_UNROLL for (int p = 0; p < P; p++) total[p][i] = __builtin_elementwise_fma((lily_float16)x[i * K + 2 * pair], even[p], total[p][i]);
    LILY_UNROLL for (int i = 0; i < lily_block_rows; i++)
      LILY_UNROLL for (int p = 0; p < P; p++) total[p][i] = __builtin_elementwise_fma((lily_float16)x[i * K + 2 * pair + 1], odd[p], total[p][i]);
  }
  LILY_UNROLL for (int p = 0; p < P; p++)
    LILY_UNROLL for (int i = 0; i < lily_block_rows; i++) sum[p * M + i] = total[p][i];
}

// sum [PANELS][M][16] += x [M, K] w [16 PANELS, K]^T
template <int M, int K, int PANELS>
LILY_INLINE void lily_multiply(lily_float16 *sum, LILY_LOCAL const bfloat *x, ulong x_stride, LILY_LOCAL const bfloat *w, ulong w_stride) {
  constexpr int kPairs = K / 2, kTogether = PANELS % lily_block_panels == 0 ? lily_block_panels : 1;
  lily_words16 panels[PANELS * kPairs];
  for (int part = 0; part < PANELS * kPairs; part += 16) {
    LILY_LOCAL const bfloat *from = w + part / kPairs * 16 * w_stride + part % kPairs * 2;
    LILY_UNROLL for (int i = 0; i < 16; i++) panels[part + i] = *(LILY_LOCAL const lily_packed_words16 *)(from + i * w_stride);
    lily_transpose16(panels + part);
  }
  for (int row = 0; row < M; row += lily_block_rows) {
    alignas(64) float block[lily_block_rows * K];
    for (int i = 0; i < lily_block_rows; i++)
      LILY_UNROLL for (int k = 0; k < K; k += 16) {
        const lily_halves16 bits = *(LILY_LOCAL const lily_packed_halves16 *)(x + (row + i) * x_stride + k);
        *(lily_words16 *)(block + i * K + k) = __builtin_convertvector(bits, lily_words16) << 16;
      }
    for (int panel = 0; panel < PANELS; panel += kTogether)
      lily_multiply_block<M, K, kTogether>(sum + panel * M + row, block, panels + panel * kPairs);
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
    constexpr int kPanels = Destination::panels;
    lily_multiply<Shape::m, Shape::k, kPanels>((lily_float16 *)destination.part, left.data, left.stride,
                                               right.data + (ulong)lily_worker()->simdgroup_index * kPanels * 16 * right.stride, right.stride);
  }
};
}  // namespace tensor_ops
}  // namespace mpp
