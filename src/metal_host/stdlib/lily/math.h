// <metal_math>, <metal_common>, <metal_relational>, <metal_geometric>. Under safe math: NaN and infinity mean
// what they mean, and precise functions are good to a few units in the last place. exp, log and their
// relatives are straight-line code without branches, so that loops over them become vector code.
#pragma once
extern "C" float lily_math1(uint which, float x);
extern "C" float lily_math2(uint which, float x, float y);

// 2^n for n in [-126, 127].
LILY_INLINE float lily_power_of_two(int n) { return as_type<float>((n + 127) << 23); }

// 2^n * e^r, |r| <= ln 2 / 2, in two steps so that subnormal results are right. Polynomial: Cephes expf.
LILY_INLINE float lily_exp_scaled(float r, int n) {
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  const int half_n = n >> 1;
  return p * lily_power_of_two(half_n) * lily_power_of_two(n - half_n);
}

// Adding and taking away 1.5 * 2^23 rounds to an integer, whose bits are then at the bottom; also for NaN.
#define LILY_ROUNDER 12582912.0f

LILY_INLINE float lily_exp(float x) {
  const float c = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;
  const float t = __builtin_fmaf(c, 1.44269504088896341f, LILY_ROUNDER), n = t - LILY_ROUNDER;
  const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, c));
  const float y = lily_exp_scaled(r, as_type<int>(t) - 0x4b400000);
  return x > 88.7228394f ? __builtin_inff() : x < -103.972084f ? 0.0f : y;
}

LILY_INLINE float lily_exp2(float x) {
  const float c = x > 129.0f ? 129.0f : x < -151.0f ? -151.0f : x;
  const float t = c + LILY_ROUNDER, n = t - LILY_ROUNDER;
  const float y = lily_exp_scaled((c - n) * 0.693147180559945309f, as_type<int>(t) - 0x4b400000);
  return x >= 128.0f ? __builtin_inff() : x < -150.0f ? 0.0f : y;
}

LILY_INLINE float lily_exp10(float x) {
  const float c = x > 39.0f ? 39.0f : x < -46.0f ? -46.0f : x;
  const float t = __builtin_fmaf(c, 3.32192809488736235f, LILY_ROUNDER), n = t - LILY_ROUNDER;
  const float r = __builtin_fmaf(n, -4.60503820e-6f, __builtin_fmaf(n, -0.301025390625f, c));   // n * log10(2) in two parts
  const float y = lily_exp_scaled(r * 2.30258509299404568f, as_type<int>(t) - 0x4b400000);
  return x > 38.5318394f ? __builtin_inff() : x < -45.5f ? 0.0f : y;
}

// log of a positive normal number as exponent and log of the mantissa in [sqrt(1/2), sqrt(2)). Cephes logf.
struct LilyLog { float exponent, mantissa; };
LILY_INLINE LilyLog lily_log_parts(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float scaled = tiny ? x * 8388608.0f : x;
  const int bits = as_type<int>(scaled) - 0x3f3504f3;            // 0x3f3504f3 = sqrt(1/2)
  const float e = (float)(bits >> 23) - (tiny ? 23.0f : 0.0f);
  const float m = as_type<float>((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  float p = 7.0376836292e-2f;
  p = __builtin_fmaf(p, m, -1.1514610310e-1f);
  p = __builtin_fmaf(p, m, 1.1676998740e-1f);
  p = __builtin_fmaf(p, m, -1.2420140846e-1f);
  p = __builtin_fmaf(p, m, 1.4249322787e-1f);
  p = __builtin_fmaf(p, m, -1.6668057665e-1f);
  p = __builtin_fmaf(p, m, 2.0000714765e-1f);
  p = __builtin_fmaf(p, m, -2.4999993993e-1f);
  p = __builtin_fmaf(p, m, 3.3333331174e-1f);
  const float square = m * m;
  return LilyLog{e, __builtin_fmaf(p, square * m, __builtin_fmaf(-0.5f, square, m))};
}
LILY_INLINE float lily_log_special(float x, float y) {
  const float finite = x == 0.0f ? -__builtin_inff() : x < 0.0f ? __builtin_nanf("") : y;
  return x == __builtin_inff() || x != x ? x : finite;
}
LILY_INLINE float lily_log(float x) {
  const LilyLog l = lily_log_parts(x);
  return lily_log_special(x, __builtin_fmaf(l.exponent, 0.693359375f, __builtin_fmaf(l.exponent, -2.12194440e-4f, l.mantissa)));
}
LILY_INLINE float lily_log2(float x) {
  const LilyLog l = lily_log_parts(x);
  return lily_log_special(x, l.exponent + l.mantissa * 1.44269504088896341f);
}
LILY_INLINE float lily_log10(float x) {
  const LilyLog l = lily_log_parts(x);
  return lily_log_special(x, __builtin_fmaf(l.exponent, 0.301029995663981195f, l.mantissa * 0.434294481903251828f));
}

LILY_INLINE float lily_tanh(float x) {
  const float a = __builtin_fabsf(x), z = x * x;
  float p = -5.70498872745e-3f;                                   // |x| < 0.625: odd polynomial (Cephes tanhf)
  p = __builtin_fmaf(p, z, 2.06390887954e-2f);
  p = __builtin_fmaf(p, z, -5.37397155531e-2f);
  p = __builtin_fmaf(p, z, 1.33314422036e-1f);
  p = __builtin_fmaf(p, z, -3.33332819422e-1f);
  const float small = __builtin_fmaf(p * z, x, x);
  const float large = 1.0f - 2.0f / (lily_exp(2.0f * a) + 1.0f);
  return a < 0.625f ? small : __builtin_copysignf(large, x);
}
LILY_INLINE float lily_round(float x) {
  const float t = __builtin_truncf(x);
  return __builtin_fabsf(x - t) >= 0.5f ? t + __builtin_copysignf(1.0f, x) : t;
}

namespace metal {
#define LILY_FUNCTION1(name, expression)                                                                  \
  LILY_INLINE float name(float x) { return expression; }                                                  \
  LILY_INLINE half name(half h) { const float x = (float)h; return (half)(expression); }                  \
  template <class T, int N> LILY_INLINE vec<T, N> name(vec<T, N> v) { LILY_EACH v.d[i] = name(v.d[i]); return v; }
#define LILY_FUNCTION2(name, expression)                                                                  \
  LILY_INLINE float name(float x, float y) { return expression; }                                         \
  LILY_INLINE half name(half a, half b) { const float x = (float)a, y = (float)b; return (half)(expression); } \
  template <class T, int N> LILY_INLINE vec<T, N> name(vec<T, N> u, vec<T, N> v) { LILY_EACH u.d[i] = name(u.d[i], v.d[i]); return u; }

// Numbers of lily_math1 and lily_math2 agree with module/module.h.
#define LILY_ALL_FUNCTIONS                                                                                \
  LILY_FUNCTION1(exp, lily_exp(x)) LILY_FUNCTION1(exp2, lily_exp2(x)) LILY_FUNCTION1(exp10, lily_exp10(x))   \
  LILY_FUNCTION1(log, lily_log(x)) LILY_FUNCTION1(log2, lily_log2(x)) LILY_FUNCTION1(log10, lily_log10(x))   \
  LILY_FUNCTION1(sqrt, __builtin_sqrtf(x)) LILY_FUNCTION1(rsqrt, 1.0f / __builtin_sqrtf(x))               \
  LILY_FUNCTION1(sin, lily_math1(0, x)) LILY_FUNCTION1(cos, lily_math1(1, x)) LILY_FUNCTION1(tan, lily_math1(2, x)) \
  LILY_FUNCTION1(asin, lily_math1(3, x)) LILY_FUNCTION1(acos, lily_math1(4, x)) LILY_FUNCTION1(atan, lily_math1(5, x)) \
  LILY_FUNCTION1(sinh, lily_math1(6, x)) LILY_FUNCTION1(cosh, lily_math1(7, x)) LILY_FUNCTION1(tanh, lily_tanh(x)) \
  LILY_FUNCTION1(asinh, lily_math1(8, x)) LILY_FUNCTION1(acosh, lily_math1(9, x)) LILY_FUNCTION1(atanh, lily_math1(10, x)) \
  LILY_FUNCTION1(floor, __builtin_floorf(x)) LILY_FUNCTION1(ceil, __builtin_ceilf(x)) LILY_FUNCTION1(trunc, __builtin_truncf(x)) \
  LILY_FUNCTION1(rint, __builtin_rintf(x)) LILY_FUNCTION1(round, lily_round(x)) LILY_FUNCTION1(fabs, __builtin_fabsf(x)) \
  LILY_FUNCTION1(fract, x - __builtin_floorf(x)) LILY_FUNCTION1(saturate, x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f) \
  LILY_FUNCTION2(pow, lily_math2(0, x, y)) LILY_FUNCTION2(powr, lily_math2(0, x, y)) LILY_FUNCTION2(fmod, lily_math2(1, x, y)) \
  LILY_FUNCTION2(atan2, lily_math2(2, x, y)) LILY_FUNCTION2(fmin, __builtin_fminf(x, y)) LILY_FUNCTION2(fmax, __builtin_fmaxf(x, y)) \
  LILY_FUNCTION2(copysign, __builtin_copysignf(x, y)) LILY_FUNCTION2(fdim, x > y ? x - y : x <= y ? 0.0f : x + y) \
  LILY_FUNCTION2(step, y < x ? 0.0f : 1.0f) LILY_FUNCTION2(divide, x / y)
LILY_ALL_FUNCTIONS
LILY_FUNCTION2(nextafter, lily_math2(3, x, y))
LILY_FUNCTION1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
LILY_FUNCTION1(abs, __builtin_fabsf(x))
LILY_FUNCTION2(min, __builtin_fminf(x, y))
LILY_FUNCTION2(max, __builtin_fmaxf(x, y))

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

namespace precise {
LILY_ALL_FUNCTIONS
LILY_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
}
// Never less exact than asked: `fast` only allows more error.
namespace fast {
LILY_ALL_FUNCTIONS
LILY_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LILY_INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
LILY_INLINE float max(float a, float b) { return __builtin_fmaxf(a, b); }
LILY_INLINE float abs(float a) { return __builtin_fabsf(a); }
LILY_INLINE float clamp(float x, float lo, float hi) { return metal::clamp(x, lo, hi); }
}
}  // namespace metal
