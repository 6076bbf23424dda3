// half: a 16-bit type that converts to and from numbers implicitly, as in Metal; arithmetic rounds after every operation.
#pragma once
struct half {
  ushort bits;

  half() = default;
  template <class T, class = metal::enable_if_t<metal::is_integral_v<T> || metal::is_same_v<T, float>>>
  LILY_INLINE half(T v) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"((float)v));
  }
  LILY_INLINE operator float() const {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
  }
};
// Templates, so that half with float is arithmetic of floats.
#define LILY_HALF_ARITHMETIC(op)                                                                                                                \
  template <class T, class = metal::enable_if_t<metal::is_same_v<T, half>>> LILY_INLINE half operator op(T a, T b) { return half((float)a op (float)b); } \
  template <class T, class = metal::enable_if_t<metal::is_arithmetic_v<T>>> LILY_INLINE half &operator op##=(half &a, T b) { return a = half((float)a op (float)b); }
LILY_HALF_ARITHMETIC(+) LILY_HALF_ARITHMETIC(-) LILY_HALF_ARITHMETIC(*) LILY_HALF_ARITHMETIC(/)
#undef LILY_HALF_ARITHMETIC
LILY_INLINE half operator-(half a) {
  a.bits ^= 0x8000;
  return a;
}
