// Language mode CUDA C++ (NVRTC, device code only): address spaces have no names, the compiler finds them by inlining.
// Library and source live in one namespace, so that their names hide CUDA's own (float4, exp, min).
#pragma once
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;

#define LILY_ROOT lily_metal
#define LILY_INLINE __forceinline__
#define LILY_UNROLL _Pragma("unroll")
#define LILY_DEVICE
#define LILY_CONSTANT
#define LILY_LOCAL
// A chosen element of a vector: an index known only at run time would put the vector into memory.
#define LILY_ELEMENT(n, d, i) (n == 2 || i < 2 ? (i == 0 ? d[0] : d[1]) : n == 3 || i == 2 ? d[2] : d[n - 1])
#define METAL_FUNC LILY_INLINE
#define __constant
#define __private

// Names of clang that the shared files use.
#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000u)
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000u)
#define __builtin_fmaf(a, b, c) __fmaf_rn(a, b, c)
#define __builtin_sqrtf(x) __fsqrt_rn(x)
#define __builtin_fabsf(x) ::fabsf(x)
#define __builtin_floorf(x) ::floorf(x)
#define __builtin_ceilf(x) ::ceilf(x)
#define __builtin_truncf(x) ::truncf(x)
#define __builtin_rintf(x) ::rintf(x)
#define __builtin_copysignf(x, y) ::copysignf(x, y)
#define __builtin_fminf(x, y) ::fminf(x, y)
#define __builtin_fmaxf(x, y) ::fmaxf(x, y)
#define __builtin_memcpy(to, from, n) ::memcpy(to, from, n)
#define __builtin_popcountll(x) __popcll(x)
#define __builtin_clzll(x) __clzll((long long)(x))
#define __builtin_ctzll(x) (__ffsll((long long)(x)) - 1)
#define __builtin_bitreverse32(x) __brev(x)
#define __builtin_bitreverse64(x) __brevll(x)

#undef NULL
#undef NAN
#undef INFINITY
#define NULL nullptr
#include "../lily/constants.h"

// One instruction instead of six; its NaN is 0x7fff.
LILY_INLINE ushort lily_round_to_bfloat(float f) {
  ushort bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
}
#if __CUDA_ARCH__ >= 900
#define LILY_BFLOAT_ROUND(f) lily_round_to_bfloat(f)
#endif
