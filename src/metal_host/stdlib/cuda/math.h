// <metal_math>. exp, log and tanh are the code that the CPU runs, so both give the same bits (and a seed the same token);
// the rest is CUDA's, good to two units in the last place. fast:: names are the approximations of the hardware.
#pragma once
#include "../lily/functions.h"

namespace metal {
#define LILY_EXACT_FUNCTIONS                                                                              \
  LILY_FUNCTION1(exp10, lily_exp10(x)) LILY_FUNCTION1(sqrt, __fsqrt_rn(x))                                \
  LILY_FUNCTION1(tan, ::tanf(x)) LILY_FUNCTION1(asin, ::asinf(x)) LILY_FUNCTION1(acos, ::acosf(x))        \
  LILY_FUNCTION1(atan, ::atanf(x)) LILY_FUNCTION1(sinh, ::sinhf(x)) LILY_FUNCTION1(cosh, ::coshf(x))      \
  LILY_FUNCTION1(tanh, lily_tanh(x)) LILY_FUNCTION1(asinh, ::asinhf(x)) LILY_FUNCTION1(acosh, ::acoshf(x)) \
  LILY_FUNCTION1(atanh, ::atanhf(x)) LILY_FUNCTION1(log10, lily_log10(x))                                 \
  LILY_FUNCTION1(floor, ::floorf(x)) LILY_FUNCTION1(ceil, ::ceilf(x)) LILY_FUNCTION1(trunc, ::truncf(x))  \
  LILY_FUNCTION1(rint, ::rintf(x)) LILY_FUNCTION1(round, lily_round(x)) LILY_FUNCTION1(fabs, ::fabsf(x))  \
  LILY_FUNCTION1(fract, x - ::floorf(x)) LILY_FUNCTION1(saturate, x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f)  \
  LILY_FUNCTION2(pow, ::powf(x, y)) LILY_FUNCTION2(powr, ::powf(x, y)) LILY_FUNCTION2(fmod, ::fmodf(x, y)) \
  LILY_FUNCTION2(atan2, ::atan2f(x, y)) LILY_FUNCTION2(fmin, ::fminf(x, y)) LILY_FUNCTION2(fmax, ::fmaxf(x, y)) \
  LILY_FUNCTION2(copysign, ::copysignf(x, y)) LILY_FUNCTION2(fdim, x > y ? x - y : x <= y ? 0.0f : x + y) \
  LILY_FUNCTION2(step, y < x ? 0.0f : 1.0f)
#define LILY_PRECISE_FUNCTIONS                                                                            \
  LILY_FUNCTION1(exp, lily_exp(x)) LILY_FUNCTION1(exp2, lily_exp2(x)) LILY_FUNCTION1(log, lily_log(x))    \
  LILY_FUNCTION1(log2, lily_log2(x)) LILY_FUNCTION1(rsqrt, __fdiv_rn(1.0f, __fsqrt_rn(x)))                \
  LILY_FUNCTION1(sin, ::sinf(x)) LILY_FUNCTION1(cos, ::cosf(x)) LILY_FUNCTION2(divide, __fdiv_rn(x, y))
#define LILY_FAST_FUNCTIONS                                                                               \
  LILY_FUNCTION1(exp, __expf(x)) LILY_FUNCTION1(exp2, ::exp2f(x)) LILY_FUNCTION1(log, __logf(x))          \
  LILY_FUNCTION1(log2, __log2f(x)) LILY_FUNCTION1(rsqrt, ::rsqrtf(x))                                      \
  LILY_FUNCTION1(sin, __sinf(x)) LILY_FUNCTION1(cos, __cosf(x)) LILY_FUNCTION2(divide, __fdividef(x, y))
LILY_EXACT_FUNCTIONS LILY_PRECISE_FUNCTIONS
LILY_FUNCTION2(nextafter, ::nextafterf(x, y))
LILY_FUNCTION1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
LILY_FUNCTION1(abs, ::fabsf(x))
LILY_FUNCTION2(min, ::fminf(x, y))
LILY_FUNCTION2(max, ::fmaxf(x, y))
}  // namespace metal
#include "../lily/common.h"

namespace metal {
namespace precise {
LILY_EXACT_FUNCTIONS LILY_PRECISE_FUNCTIONS
LILY_INLINE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
}
namespace fast {
LILY_EXACT_FUNCTIONS LILY_FAST_FUNCTIONS
LILY_INLINE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LILY_INLINE float min(float a, float b) { return ::fminf(a, b); }
LILY_INLINE float max(float a, float b) { return ::fmaxf(a, b); }
LILY_INLINE float abs(float a) { return ::fabsf(a); }
LILY_INLINE float clamp(float x, float lo, float hi) { return metal::clamp(x, lo, hi); }
}
}  // namespace metal
