// exp, log and their relatives as straight-line code without branches, so that loops over them become vector code, and
// every device gives the same bits; and the macros that lift a function of float to half and to vectors.
#pragma once
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

#define LILY_FUNCTION1(name, expression)                                                                  \
  LILY_INLINE float name(float x) { return expression; }                                                  \
  LILY_INLINE half name(half h) { const float x = (float)h; return (half)(expression); }                  \
  template <class T, int N> LILY_INLINE vec<T, N> name(vec<T, N> v) { LILY_EACH v.d[i] = name(v.d[i]); return v; }
#define LILY_FUNCTION2(name, expression)                                                                  \
  LILY_INLINE float name(float x, float y) { return expression; }                                         \
  LILY_INLINE half name(half a, half b) { const float x = (float)a, y = (float)b; return (half)(expression); } \
  template <class T, int N> LILY_INLINE vec<T, N> name(vec<T, N> u, vec<T, N> v) { LILY_EACH u.d[i] = name(u.d[i], v.d[i]); return u; }

