// <metal_simdgroup_matrix>: 8x8 matrices. Lane 0 holds the whole matrix and does the work for the
// simdgroup as vector code; the other lanes skip. That is right because Metal asks for a barrier between a
// lane's plain writes and simdgroup_load, and again after simdgroup_store. Rows are kept as float whatever
// the element type: each value is one that the type can hold.
#pragma once
typedef float lily_row __attribute__((ext_vector_type(8)));
typedef ushort lily_row_bits __attribute__((ext_vector_type(8)));
typedef half lily_row_half __attribute__((ext_vector_type(8)));
typedef uint lily_row_words __attribute__((ext_vector_type(8)));

#if LILY_STRICT
#define LILY_MATRIX_OPERATION(site) lily_engine_table.rendezvous(site)      // all lanes have to be here
#else
#define LILY_MATRIX_OPERATION(site) ((void)(site))
#endif

template <class T> struct lily_matrix_row;
template <> struct lily_matrix_row<float> {
  typedef float packed __attribute__((ext_vector_type(8), aligned(4)));
  static LILY_INLINE lily_row widen(packed r) { return r; }
  static LILY_INLINE packed narrow(lily_row r) { return r; }
};
template <> struct lily_matrix_row<half> {
  typedef half packed __attribute__((ext_vector_type(8), aligned(2)));
  static LILY_INLINE lily_row widen(packed r) { return __builtin_convertvector(r, lily_row); }
  static LILY_INLINE packed narrow(lily_row r) { return __builtin_convertvector(r, lily_row_half); }
};
template <> struct lily_matrix_row<bfloat> {
  typedef ushort packed __attribute__((ext_vector_type(8), aligned(2)));
  static LILY_INLINE lily_row widen(packed r) { return __builtin_bit_cast(lily_row, __builtin_convertvector(r, lily_row_words) << 16); }
  static LILY_INLINE packed narrow(lily_row r) {                  // bfloat::round, eight at a time
    const lily_row_words u = __builtin_bit_cast(lily_row_words, r);
    const lily_row_words rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    const lily_row_words nan = u >> 16 | 0x40u;
    return __builtin_convertvector((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded, lily_row_bits);
  }
};

namespace metal {
template <class T, int Rows, int Columns> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8x8");
  lily_row row[8];
  simdgroup_matrix() = default;
  explicit LILY_INLINE simdgroup_matrix(T diagonal) {
    if (lily_lane() != 0) return;
    LILY_UNROLL for (int i = 0; i < 8; i++)
      LILY_UNROLL for (int j = 0; j < 8; j++) row[i][j] = i == j ? (float)diagonal : 0.0f;
  }
  // Which lane holds which element differs between GPU generations.
  template <class U = T> LILY_INLINE void thread_elements() const {
    static_assert(sizeof(U) == 0, "thread_elements() is not offered: the layout is not the same on every GPU; go through threadgroup memory");
  }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int Rows, int Columns = Rows> LILY_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  if (lily_lane() == 0)
    LILY_UNROLL for (int i = 0; i < 8; i++) m.row[i] = (lily_row)(float)value;
  return m;
}

template <class D, class A, class B, class C>
LILY_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b,
                                               const simdgroup_matrix<C, 8, 8> &c, LILY_SITE) {
  LILY_MATRIX_OPERATION(site);
  if (lily_lane() != 0) return;
  // Elements of a are broadcast straight from memory; without the asm the compiler would keep 64 vectors of them.
  ulong left = (ulong)&a.row[0];
  asm volatile("" : "+r"(left) : "m"(a));
  const float *element = (const float *)left;
  LILY_UNROLL for (int i = 0; i < 8; i++) {
    lily_row sum = c.row[i];
    LILY_UNROLL for (int k = 0; k < 8; k++) sum = __builtin_elementwise_fma((lily_row)element[8 * i + k], b.row[k], sum);
    if constexpr (is_same_v<D, float>) d.row[i] = sum;
    else d.row[i] = lily_matrix_row<D>::widen(lily_matrix_row<D>::narrow(sum));
  }
}
template <class D, class A, class B>
LILY_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b, LILY_SITE) {
  simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8>((D)0.0f);
  simdgroup_multiply_accumulate(d, a, b, zero, site);
}

LILY_INLINE void lily_transpose(lily_row *row) {
  lily_row a[8], b[8];
  LILY_UNROLL for (int i = 0; i < 4; i++) {                        // pairs of neighbouring rows
    a[2 * i] = __builtin_shufflevector(row[2 * i], row[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    a[2 * i + 1] = __builtin_shufflevector(row[2 * i], row[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  LILY_UNROLL for (int i = 0; i < 8; i++)                          // rows at distance 2
    b[i] = i & 2 ? __builtin_shufflevector(a[i & 5], a[i | 2], 2, 3, 10, 11, 6, 7, 14, 15)
                 : __builtin_shufflevector(a[i], a[i | 2], 0, 1, 8, 9, 4, 5, 12, 13);
  LILY_UNROLL for (int i = 0; i < 8; i++)                          // rows at distance 4
    row[i] = i & 4 ? __builtin_shufflevector(b[i & 3], b[i], 4, 5, 6, 7, 12, 13, 14, 15)
                   : __builtin_shufflevector(b[i], b[i | 4], 0, 1, 2, 3, 8, 9, 10, 11);
}
#define LILY_MATRIX_MEMORY(space, load_space)                                                                           \
  template <class T> LILY_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &m, load_space T *p, ulong stride = 8,    \
                                                     vec<ulong, 2> origin = vec<ulong, 2>(0), bool transpose = false, LILY_SITE) { \
    LILY_MATRIX_OPERATION(site);                                                                                        \
    if (lily_lane() != 0) return;                                                                                       \
    using Packed = typename lily_matrix_row<T>::packed;                                                                 \
    LILY_UNROLL for (ulong i = 0; i < 8; i++)                                                                                       \
      m.row[i] = lily_matrix_row<T>::widen(*(load_space Packed *)(p + (origin.y + i) * stride + origin.x));             \
    if (transpose) lily_transpose(m.row);                                                                               \
  }
#define LILY_MATRIX_STORE(space)                                                                                        \
  template <class T> LILY_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &m, space T *p, ulong stride = 8,  \
                                                      vec<ulong, 2> origin = vec<ulong, 2>(0), bool transpose = false, LILY_SITE) { \
    LILY_MATRIX_OPERATION(site);                                                                                        \
    if (lily_lane() != 0) return;                                                                                       \
    using Packed = typename lily_matrix_row<T>::packed;                                                                 \
    simdgroup_matrix<T, 8, 8> t = m;                                                                                    \
    if (transpose) lily_transpose(t.row);                                                                               \
    LILY_UNROLL for (ulong i = 0; i < 8; i++)                                                                                       \
      *(space Packed *)(p + (origin.y + i) * stride + origin.x) = lily_matrix_row<T>::narrow(t.row[i]);                 \
  }
LILY_MATRIX_MEMORY(LILY_DEVICE, const LILY_DEVICE)
LILY_MATRIX_MEMORY(LILY_CONSTANT, const LILY_CONSTANT)
LILY_MATRIX_MEMORY(LILY_LOCAL, const LILY_LOCAL)
LILY_MATRIX_STORE(LILY_DEVICE)
LILY_MATRIX_STORE(LILY_LOCAL)
#undef LILY_MATRIX_MEMORY
#undef LILY_MATRIX_STORE
}  // namespace metal
