// <MetalPerformancePrimitives>: matmul2d on mma.sync m16n8k16 with bf16 operands from threadgroup memory (ldmatrix) and f32 accumulators.
// The simdgroups of the scope cut the destination into a grid of equal parts. A lane holds of each 16 x 8 piece rows l / 4 and
// l / 4 + 8, columns 2 (l % 4) and the next. Operands' rows start at 16-byte boundaries: ldmatrix reads 8 neighbours at a time.
#pragma once
// The four 8 x 8 matrices whose rows lanes 0..7, 8..15, 16..23 and 24..31 point to.
LILY_INLINE void lily_ldmatrix4(uint *to, const ushort *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((uint)__cvta_generic_to_shared(row)) : "memory");
}
LILY_INLINE uint lily_simdgroup_index() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) >> 5; }

namespace metal {
template <class T, int M, int N, int Simdgroups> struct cooperative_tensor {
  static_assert(is_same_v<T, float>, "destinations are float");
  // Tall parts where there are rows for two: operands are read least often when a part is about square.
  static constexpr int down = Simdgroups % 2 == 0 && M >= 32 ? 2 : 1, across = Simdgroups / down;
  static constexpr int rows = M / down, columns = N / across, pieces_down = rows / 16, pieces = columns / 8;
  static_assert(pieces_down * 16 * down == M && pieces * 8 * across == N && (pieces & (pieces - 1)) == 0 && pieces > 1, "matmul2d: parts have 16, 32, 64 ... columns");
  float value[pieces_down * pieces * 4];
  LILY_INLINE constexpr ushort get_capacity() const { return pieces_down * pieces * 4; }
  LILY_INLINE constexpr bool is_valid_element(ushort) const { return true; }
  LILY_INLINE float &operator[](ushort i) { return value[i]; }
  LILY_INLINE float operator[](ushort i) const { return value[i]; }
  static LILY_INLINE uint first_row() { return lily_simdgroup_index() / across * rows; }
  static LILY_INLINE uint first_column() { return lily_simdgroup_index() % across * columns; }
  template <class Extents> LILY_INLINE void store(tensor<float, Extents, tensor_inline> &target) const {
    const uint lane = lily_lane(), row = lane / 4, turn = row % pieces;
    float *to = target.data + (first_row() + row) * target.stride + first_column() + lane % 4 * 2;
    LILY_UNROLL for (int i = 0; i < pieces_down; i++)
      LILY_UNROLL for (int part = 0; part < 2; part++) {
        // Rows may lie in the same banks, so each begins at a piece of its own: their pieces turn round by the row's number.
        lily_pair<float> pair[pieces], turned[pieces];
        LILY_UNROLL for (int j = 0; j < pieces; j++) pair[j].set(value[(i * pieces + j) * 4 + part * 2], value[(i * pieces + j) * 4 + part * 2 + 1]);
        LILY_UNROLL for (int step = 1; step < pieces; step *= 2) {
          LILY_UNROLL for (int j = 0; j < pieces; j++) turned[j] = turn & step ? pair[(j + step) % pieces] : pair[j];
          LILY_UNROLL for (int j = 0; j < pieces; j++) pair[j] = turned[j];
        }
        LILY_UNROLL for (int j = 0; j < pieces; j++)
          *(lily_pair<float> *)(to + (i * 16 + part * 8) * target.stride + (j + turn) % pieces * 8) = pair[j];
      }
  }
};
}  // namespace metal

namespace mpp {
namespace tensor_ops {
template <long Descriptor, class Scope> struct matmul2d {
  using Shape = lily_descriptor<Descriptor>;
  using Destination = metal::cooperative_tensor<float, Shape::m, Shape::n, Scope::count>;
  static_assert(Shape::transpose_right && Shape::accumulate, "matmul2d: multiply_accumulate with a transposed right operand is offered");
  static_assert(Shape::k % 16 == 0, "matmul2d: k is a multiple of 16");

  template <class Left, class Right, class T> LILY_INLINE Destination get_destination_cooperative_tensor() const { return Destination(); }

  // destination += left [m, k] right [n, k]^T
  template <class Extents>
  LILY_INLINE void run(metal::tensor<bfloat, Extents, metal::tensor_inline> &left, metal::tensor<bfloat, Extents, metal::tensor_inline> &right,
                       Destination &destination) const {
    constexpr int kDown = Destination::pieces_down, kPieces = Destination::pieces;
    const uint lane = lily_lane();
    // Matrices of a left piece: top and bottom rows of the first half of k, then of the second; of a right one: both halves of k of
    // the first 8 rows, then of the next 8.
    const ushort *a_row = (const ushort *)left.data + (Destination::first_row() + lane % 16) * left.stride + lane / 16 * 8;
    const ushort *b_row = (const ushort *)right.data + (Destination::first_column() + lane % 8 + lane / 16 * 8) * right.stride + lane / 8 % 2 * 8;
    LILY_UNROLL for (int k = 0; k < Shape::k; k += 16) {
      uint a[kDown][4];
      LILY_UNROLL for (int i = 0; i < kDown; i++) lily_ldmatrix4(a[i], a_row + i * 16 * left.stride + k);
      LILY_UNROLL for (int j = 0; j < kPieces; j += 2) {
        uint b[4];
        lily_ldmatrix4(b, b_row + j * 8 * right.stride + k);
        LILY_UNROLL for (int i = 0; i < kDown; i++) {
          float *d = destination.value + (i * kPieces + j) * 4;
          lily_mma16(d, a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
          lily_mma16(d + 4, a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
        }
      }
    }
  }
};
}  // namespace tensor_ops
}  // namespace mpp
