// <metal_common>, <metal_relational>, <metal_geometric>: what is built from other functions, the same for every device.
#pragma once
namespace metal {
LILY_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LILY_INLINE half fma(half a, half b, half c) { return (half)__builtin_fmaf((float)a, (float)b, (float)c); }
template <class T, int N> LILY_INLINE vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) { LILY_EACH c.d[i] = fma(a.d[i], b.d[i], c.d[i]); return c; }
LILY_INLINE float clamp(float x, float lo, float hi) { return min(max(x, lo), hi); }
LILY_INLINE half clamp(half x, half lo, half hi) { return min(max(x, lo), hi); }
template <class T, int N> LILY_INLINE vec<T, N> clamp(vec<T, N> x, vec<T, N> lo, vec<T, N> hi) { return min(max(x, lo), hi); }
template <class T, int N> LILY_INLINE vec<T, N> clamp(vec<T, N> x, lily_same_t<T> lo, lily_same_t<T> hi) { LILY_EACH x.d[i] = clamp(x.d[i], lo, hi); return x; }
LILY_INLINE float min3(float a, float b, float c) { return min(a, min(b, c)); }
LILY_INLINE float max3(float a, float b, float c) { return max(a, max(b, c)); }
LILY_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
template <class T, int N> LILY_INLINE vec<T, N> mix(vec<T, N> a, vec<T, N> b, vec<T, N> t) { return a + (b - a) * t; }
LILY_INLINE float smoothstep(float a, float b, float x) { const float t = saturate((x - a) / (b - a)); return t * t * (3.0f - 2.0f * t); }
LILY_INLINE float ldexp(float x, int k) {
  const int n = k < -252 ? -252 : k > 254 ? 254 : k, a = n >> 1;
  return x * lily_power_of_two(a) * lily_power_of_two(n - a);
}
template <class I> LILY_INLINE float modf(float x, I &whole) { whole = __builtin_truncf(x); return x - whole; }
LILY_INLINE float sincos(float x, __private float &cosine) { cosine = cos(x); return sin(x); }

LILY_INLINE bool isnan(float x) { return x != x; }
LILY_INLINE bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
LILY_INLINE bool isfinite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
LILY_INLINE bool isnormal(float x) { return isfinite(x) && __builtin_fabsf(x) >= 1.17549435e-38f; }
LILY_INLINE bool signbit(float x) { return as_type<int>(x) < 0; }
template <int N> LILY_INLINE vec<bool, N> isnan(vec<float, N> v) { vec<bool, N> r; LILY_EACH r.d[i] = isnan(v.d[i]); return r; }
template <int N> LILY_INLINE vec<bool, N> isfinite(vec<float, N> v) { vec<bool, N> r; LILY_EACH r.d[i] = isfinite(v.d[i]); return r; }

template <class T> LILY_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> LILY_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) { LILY_EACH a.d[i] = c.d[i] ? b.d[i] : a.d[i]; return a; }

template <class T, int N> LILY_INLINE T dot(vec<T, N> a, vec<T, N> b) {
  T s = (T)(a.d[0] * b.d[0]);
  LILY_UNROLL for (int i = 1; i < N; i++) s = (T)(a.d[i] * b.d[i] + s);
  return s;
}
template <class T, int N> LILY_INLINE T length_squared(vec<T, N> a) { return dot(a, a); }
template <class T, int N> LILY_INLINE T length(vec<T, N> a) { return sqrt(dot(a, a)); }
template <class T, int N> LILY_INLINE vec<T, N> normalize(vec<T, N> a) { return a * vec<T, N>(rsqrt(dot(a, a))); }
}  // namespace metal
