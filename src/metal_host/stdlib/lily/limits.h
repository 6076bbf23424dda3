// <metal_numeric>: numeric_limits.
#pragma once
namespace metal {
template <class T> struct numeric_limits;
#define LILY_LIMITS(T, d, smallest, largest, low, inf, nan, eps)                    \
  template <> struct numeric_limits<T> {                                            \
    static constexpr __constant int digits = d;                                     \
    static constexpr LILY_INLINE T min() { return smallest; }                       \
    static constexpr LILY_INLINE T max() { return largest; }                        \
    static constexpr LILY_INLINE T lowest() { return low; }                         \
    static constexpr LILY_INLINE T infinity() { return inf; }                       \
    static constexpr LILY_INLINE T quiet_NaN() { return nan; }                      \
    static constexpr LILY_INLINE T epsilon() { return eps; }                        \
  };
LILY_LIMITS(char, 7, -128, 127, -128, 0, 0, 0)
LILY_LIMITS(uchar, 8, 0, 255, 0, 0, 0, 0)
LILY_LIMITS(short, 15, -32768, 32767, -32768, 0, 0, 0)
LILY_LIMITS(ushort, 16, 0, 65535, 0, 0, 0, 0)
LILY_LIMITS(int, 31, -2147483647 - 1, 2147483647, -2147483647 - 1, 0, 0, 0)
LILY_LIMITS(uint, 32, 0, 4294967295u, 0, 0, 0, 0)
LILY_LIMITS(long, 63, -9223372036854775807L - 1, 9223372036854775807L, -9223372036854775807L - 1, 0, 0, 0)
LILY_LIMITS(ulong, 64, 0, 18446744073709551615UL, 0, 0, 0, 0)
LILY_LIMITS(float, 24, 1.17549435e-38f, 3.40282347e+38f, -3.40282347e+38f, __builtin_inff(), __builtin_nanf(""), 1.1920929e-7f)
LILY_LIMITS(half, 11, (half)6.103515625e-5f, (half)65504.f, (half)-65504.f, (half)__builtin_inff(), (half)__builtin_nanf(""), (half)9.765625e-4f)
LILY_LIMITS(bfloat, 8, bfloat(1.17549435e-38f), bfloat(3.3895314e38f), bfloat(-3.3895314e38f), bfloat(__builtin_inff()), bfloat(__builtin_nanf("")), bfloat(0.0078125f))
#undef LILY_LIMITS
}  // namespace metal
