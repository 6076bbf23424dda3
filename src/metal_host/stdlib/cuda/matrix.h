// <metal_simdgroup_matrix>: 8x8 matrices for mma.sync. Lane l holds row l / 4, columns 2 (l % 4) and the next: the layout of
// the left operand and of the result. The right operand wants the same layout of its transpose, so a matrix may be held
// transposed: simdgroup_load takes neighbouring elements whatever `transpose` says, and movmatrix turns a matrix round where
// its use asks for the other form. After inlining every `turned` is a constant.
//
// 16-bit operands: one m16n8k8 whose rows 8..15 are zero. A float operand is split into three bf16 parts, which hold all 24
// bits of it; products of parts are exact in f32. With a float on one side the parts fill the 16 x 16 of one m16n8k16 (top
// half of k: part 0, bottom half: part 2, rows 8..15: part 1); with floats on both sides two of them give every product but
// the three smallest. Loads and stores move pairs: addresses and strides must be multiples of two elements.
#pragma once
LILY_INLINE uint lily_movmatrix(uint pair) {
  uint turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
LILY_INLINE uint lily_pack(ushort low, ushort high) { return (uint)high << 16 | low; }

template <class T> struct lily_pair {                         // two elements of a 16-bit type
  uint bits;
  static LILY_INLINE T element(ushort bits) { T t; t.bits = bits; return t; }
  LILY_INLINE float get(int i) const { return (float)element((ushort)(i ? bits >> 16 : bits & 0xffffu)); }
  LILY_INLINE void set(float a, float b) { bits = lily_pack(T(a).bits, T(b).bits); }
  LILY_INLINE void turn() { bits = lily_movmatrix(bits); }
};
template <> struct alignas(8) lily_pair<float> {
  float value[2];
  LILY_INLINE float get(int i) const { return value[i]; }
  LILY_INLINE void set(float a, float b) { value[0] = a; value[1] = b; }
  LILY_INLINE void turn() {
    const uint a = as_type<uint>(value[0]), b = as_type<uint>(value[1]);
    const uint low = lily_movmatrix(__byte_perm(a, b, 0x5410)), high = lily_movmatrix(__byte_perm(a, b, 0x7632));
    value[0] = as_type<float>(__byte_perm(low, high, 0x5410));
    value[1] = as_type<float>(__byte_perm(low, high, 0x7632));
  }
};

namespace metal {
template <class T, int Rows, int Columns> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup matrices are 8x8");
  lily_pair<T> pair;
  bool turned;
  simdgroup_matrix() = default;
  explicit LILY_INLINE simdgroup_matrix(T diagonal) : turned(false) {
    const uint lane = lily_lane(), row = lane / 4, column = lane % 4 * 2;
    pair.set(row == column ? (float)diagonal : 0.0f, row == column + 1 ? (float)diagonal : 0.0f);
  }
  LILY_INLINE lily_pair<T> as(bool transposed) const {
    lily_pair<T> p = pair;
    if (turned != transposed) p.turn();
    return p;
  }
  // Which lane holds which element differs between GPU generations.
  template <class U = T> LILY_INLINE void thread_elements() const {
    static_assert(sizeof(U) == 0, "thread_elements() is not offered: the layout is not the same on every GPU; go through threadgroup memory");
  }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
}  // namespace metal

// d (rows 0..7 in 0 and 1, rows 8..15 in 2 and 3) += a b
template <class T> LILY_INLINE void lily_mma8(float *d, uint a, uint b) {
  if constexpr (metal::is_same_v<T, half>)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(0u), "r"(b));
  else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(0u), "r"(b));
}
// a: top rows left half, bottom rows left half, top rows right half, bottom rows right half; b: top half of k, bottom half
LILY_INLINE void lily_mma16(float *d, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Three bf16 parts of two floats: value = part[0] + part[1] + part[2]. Parts are cut off, not rounded, so no part overflows.
struct lily_parts {
  uint part[3];
  template <class T> explicit LILY_INLINE lily_parts(lily_pair<T> p) {
    float a = p.get(0), b = p.get(1);
    LILY_UNROLL for (int i = 0; i < 3; i++) {
      part[i] = __byte_perm(as_type<uint>(a), as_type<uint>(b), 0x7632);
      // what is not finite has no rest
      a = metal::isfinite(a) ? a - as_type<float>(as_type<uint>(a) & 0xffff0000u) : 0.0f;
      b = metal::isfinite(b) ? b - as_type<float>(as_type<uint>(b) & 0xffff0000u) : 0.0f;
    }
  }
};

namespace metal {
template <class T, int Rows, int Columns = Rows> LILY_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.pair.set((float)value, (float)value);
  m.turned = false;
  return m;
}

template <class D, class A, class B, class C>
LILY_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b,
                                               const simdgroup_matrix<C, 8, 8> &c) {
  const auto left = a.as(false);
  const auto right = b.as(true);
  const auto start = c.as(false);
  float sum[4] = {start.get(0), start.get(1), 0.0f, 0.0f};
  if constexpr (is_same_v<A, B> && !is_same_v<A, float>) {
    lily_mma8<A>(sum, left.bits, right.bits);
  } else if constexpr (is_same_v<B, bfloat>) {
    const lily_parts l(left);
    lily_mma16(sum, l.part[0], l.part[1], l.part[2], 0, right.bits, right.bits);
  } else if constexpr (is_same_v<A, bfloat>) {
    const lily_parts r(right);
    lily_mma16(sum, left.bits, 0, left.bits, 0, r.part[1], r.part[2]);
    lily_mma8<bfloat>(sum, left.bits, r.part[0]);
  } else {
    const lily_parts l(left), r(right);
    lily_mma16(sum, l.part[0], l.part[1], l.part[0], 0, r.part[1], r.part[2]);
    lily_mma16(sum, l.part[0], l.part[1], l.part[2], 0, r.part[0], r.part[0]);
  }
  d.pair.set(sum[0] + sum[2], sum[1] + sum[3]);
  d.turned = false;
}
template <class D, class A, class B>
LILY_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b) {
  const simdgroup_matrix<float, 8, 8> zero = make_filled_simdgroup_matrix<float, 8>(0.0f);
  simdgroup_multiply_accumulate(d, a, b, zero);
}

template <class T> LILY_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &m, const T *p, ulong stride = 8,
                                                   vec<ulong, 2> origin = vec<ulong, 2>(0), bool transpose = false) {
  const uint lane = lily_lane();
  m.pair = *(const lily_pair<T> *)(p + (origin.y + lane / 4) * stride + origin.x + lane % 4 * 2);
  m.turned = transpose;
}
template <class T> LILY_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &m, T *p, ulong stride = 8,
                                                    vec<ulong, 2> origin = vec<ulong, 2>(0), bool transpose = false) {
  const uint lane = lily_lane();
  *(lily_pair<T> *)(p + (origin.y + lane / 4) * stride + origin.x + lane % 4 * 2) = m.as(transpose);
}
}  // namespace metal
