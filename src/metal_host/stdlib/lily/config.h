// Language mode: names of address spaces and basic types. This mode is C++ for OpenCL, whose address
// spaces are checked by the compiler and cost nothing.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

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

#define LILY_INLINE inline __attribute__((always_inline))
#define LILY_UNROLL _Pragma("unroll")
#define LILY_DEVICE __attribute__((opencl_global_device))
#define LILY_CONSTANT __attribute__((opencl_global_host))
#define LILY_LOCAL __local
#define LILY_ELEMENT(n, d, i) d[i]
#define METAL_FUNC LILY_INLINE
#define NULL nullptr
#define LILY_ROOT                    // namespace around library and source; none here

#include "constants.h"
