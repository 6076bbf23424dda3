// <metal_integer>.
#pragma once
namespace metal {
#define LILY_MINMAX(T)                                                 \
  LILY_INLINE T min(T a, T b) { return b < a ? b : a; }                \
  LILY_INLINE T max(T a, T b) { return a < b ? b : a; }                \
  LILY_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); } \
  LILY_INLINE T min3(T a, T b, T c) { return min(a, min(b, c)); }      \
  LILY_INLINE T max3(T a, T b, T c) { return max(a, max(b, c)); }
LILY_MINMAX(char) LILY_MINMAX(uchar) LILY_MINMAX(short) LILY_MINMAX(ushort) LILY_MINMAX(int) LILY_MINMAX(uint) LILY_MINMAX(long) LILY_MINMAX(ulong)
#undef LILY_MINMAX

#define LILY_BITS(T, U, bits)                                                                                     \
  LILY_INLINE T popcount(T x) { return (T)__builtin_popcountll((ulong)(U)x); }                                    \
  LILY_INLINE T clz(T x) { return (T)((U)x ? __builtin_clzll((ulong)(U)x) - (64 - bits) : bits); }                \
  LILY_INLINE T ctz(T x) { return (T)((U)x ? __builtin_ctzll((ulong)(U)x) : bits); }                              \
  LILY_INLINE T rotate(T x, T k) {                                                                                \
    const uint s = (uint)k & (bits - 1);                                                                          \
    return (T)(s ? (U)((U)x << s | (U)x >> (bits - s)) : (U)x);                                                   \
  }                                                                                                               \
  LILY_INLINE T absdiff(T a, T b) { return a < b ? (T)(b - a) : (T)(a - b); }
LILY_BITS(char, uchar, 8) LILY_BITS(uchar, uchar, 8) LILY_BITS(short, ushort, 16) LILY_BITS(ushort, ushort, 16)
LILY_BITS(int, uint, 32) LILY_BITS(uint, uint, 32) LILY_BITS(long, ulong, 64) LILY_BITS(ulong, ulong, 64)
#undef LILY_BITS

LILY_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
LILY_INLINE ulong reverse_bits(ulong x) { return __builtin_bitreverse64(x); }
LILY_INLINE uint extract_bits(uint x, uint offset, uint bits) { return bits == 32 ? x : x >> offset & ((1u << bits) - 1); }
LILY_INLINE int extract_bits(int x, uint offset, uint bits) { return bits == 0 ? 0 : (int)((uint)x << (32 - offset - bits)) >> (32 - bits); }
LILY_INLINE uint insert_bits(uint base, uint value, uint offset, uint bits) {
  const uint mask = (bits == 32 ? ~0u : (1u << bits) - 1) << offset;
  return (base & ~mask) | (value << offset & mask);
}
LILY_INLINE uint mulhi(uint a, uint b) { return (uint)((ulong)a * b >> 32); }
LILY_INLINE int mulhi(int a, int b) { return (int)((long)a * b >> 32); }
LILY_INLINE uint madhi(uint a, uint b, uint c) { return mulhi(a, b) + c; }
LILY_INLINE uint mul24(uint a, uint b) { return (a & 0xffffff) * (b & 0xffffff); }
LILY_INLINE uint mad24(uint a, uint b, uint c) { return mul24(a, b) + c; }

LILY_INLINE int abs(int x) { return x < 0 ? -x : x; }
LILY_INLINE short abs(short x) { return (short)(x < 0 ? -x : x); }
LILY_INLINE long abs(long x) { return x < 0 ? -x : x; }
LILY_INLINE uint abs(uint x) { return x; }
LILY_INLINE ulong abs(ulong x) { return x; }

template <class T, int N> LILY_INLINE vec<T, N> popcount(vec<T, N> v) { LILY_EACH v.d[i] = popcount(v.d[i]); return v; }
template <class T, int N> LILY_INLINE vec<T, N> clz(vec<T, N> v) { LILY_EACH v.d[i] = clz(v.d[i]); return v; }
template <class T, int N> LILY_INLINE vec<T, N> mulhi(vec<T, N> a, vec<T, N> b) { LILY_EACH a.d[i] = mulhi(a.d[i], b.d[i]); return a; }
}  // namespace metal
