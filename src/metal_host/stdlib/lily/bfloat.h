// bfloat with Metal's conversion rules: to float implicitly, from float only explicitly, never mixed with half.
#pragma once

struct bfloat {
  ushort bits;

  bfloat() = default;
  constexpr explicit LILY_INLINE bfloat(float f) : bits(round(f)) {}
  template <class T, class = metal::enable_if_t<metal::is_integral_v<T> || metal::is_same_v<T, half>>>
  constexpr explicit LILY_INLINE bfloat(T v) : bits(round((float)v)) {}
  constexpr LILY_INLINE operator float() const { return __builtin_bit_cast(float, (uint)bits << 16); }
  template <class T, class = metal::enable_if_t<metal::is_same_v<T, half>>> operator T() const = delete;   // half and bfloat do not mix

  // Round to nearest even; a NaN keeps its sign and stays a NaN.
  static constexpr LILY_INLINE ushort round(float f) {
#ifdef LILY_BFLOAT_ROUND
    if (!__builtin_is_constant_evaluated()) return LILY_BFLOAT_ROUND(f);
#endif
    const uint u = __builtin_bit_cast(uint, f);
    const uint rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    return (ushort)((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16 | 0x40u) : rounded);
  }
};

#define LILY_BFLOAT_ARITHMETIC(op)                                                                                       \
  constexpr LILY_INLINE bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op (float)b); }                  \
  LILY_INLINE bfloat &operator op##=(bfloat &a, bfloat b) { return a = bfloat((float)a op (float)b); }                   \
  void operator op(bfloat, half) = delete;                                                                               \
  void operator op(half, bfloat) = delete;
LILY_BFLOAT_ARITHMETIC(+) LILY_BFLOAT_ARITHMETIC(-) LILY_BFLOAT_ARITHMETIC(*) LILY_BFLOAT_ARITHMETIC(/)
#undef LILY_BFLOAT_ARITHMETIC
#define LILY_BFLOAT_COMPARE(op)                                                                            \
  constexpr LILY_INLINE bool operator op(bfloat a, bfloat b) { return (float)a op (float)b; }              \
  void operator op(bfloat, half) = delete;                                                                 \
  void operator op(half, bfloat) = delete;
LILY_BFLOAT_COMPARE(==) LILY_BFLOAT_COMPARE(!=) LILY_BFLOAT_COMPARE(<) LILY_BFLOAT_COMPARE(<=) LILY_BFLOAT_COMPARE(>) LILY_BFLOAT_COMPARE(>=)
#undef LILY_BFLOAT_COMPARE
constexpr LILY_INLINE bfloat operator-(bfloat a) { return __builtin_bit_cast(bfloat, (ushort)(a.bits ^ 0x8000)); }
