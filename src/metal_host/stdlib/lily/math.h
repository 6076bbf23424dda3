// <metal_math>. Under safe math: NaN and infinity mean what they mean, and precise functions are good to a few units in
// the last place.
#pragma once
#include "functions.h"
extern "C" float lily_math1(uint which, float x);
extern "C" float lily_math2(uint which, float x, float y);

namespace metal {
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
}  // namespace metal
#include "common.h"
namespace metal {

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
