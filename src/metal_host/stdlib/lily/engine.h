// How kernel code reaches the engine: the worker's header by the stack pointer, functions by a table.
#pragma once
#define LILY_KERNEL_SIDE 1
#include "kernel_abi.h"

extern "C" { extern __global LilyEngineTable lily_engine_table __attribute__((visibility("hidden"))); }

// The source line is the identity of a simd operation: lanes that meet at one line take part together.
#define LILY_SITE uint site = (uint)__builtin_LINE()

// The asm has no side effects and stays valid for a lane's life, so the compiler keeps or repeats it freely.
LILY_INLINE LilyWorkerHeader *lily_worker() {
  ulong stack;
  asm("movq %%rsp, %0" : "=r"(stack));
  return (LilyWorkerHeader *)(stack & ~(LILY_REGION_BYTES - 1));
}
LILY_INLINE uint lily_lane() {
  uint lane;
  asm("movl %c2(%1), %0" : "=r"(lane) : "r"(lily_worker()), "i"(__builtin_offsetof(LilyWorkerHeader, lane)));
  return lane;
}
LILY_INLINE LilySimdgroupHeader *lily_simdgroup() { return (LilySimdgroupHeader *)lily_worker()->simdgroup; }
LILY_INLINE LilyExchange *lily_in() { return (LilyExchange *)lily_simdgroup()->in; }
LILY_INLINE LilyExchange *lily_out() { return (LilyExchange *)lily_simdgroup()->out; }

// Value of function constant number n; invariant in a dispatch, hence an asm that may leave loops.
LILY_INLINE ulong lily_constants() {
  ulong address;
  asm("movq %c2(%1), %0" : "=r"(address) : "r"(lily_worker()), "i"(__builtin_offsetof(LilyWorkerHeader, constants)));
  return address;
}
template <class T, uint n> LILY_INLINE T lily_constant() {
  const ulong base = lily_constants();
  uint word;
  if constexpr (sizeof(T) == 4) asm("movl %c2(%1), %0" : "=r"(word) : "r"(base), "i"(32 * n));
  else if constexpr (sizeof(T) == 2) asm("movzwl %c2(%1), %0" : "=r"(word) : "r"(base), "i"(32 * n));
  else if constexpr (sizeof(T) == 1) asm("movzbl %c2(%1), %0" : "=r"(word) : "r"(base), "i"(32 * n));
  if constexpr (metal::is_same_v<T, bool>) return (word & 1) != 0;
  else if constexpr (sizeof(T) == 4) return as_type<T>(word);
  else if constexpr (sizeof(T) == 2) return as_type<T>((ushort)word);
  else if constexpr (sizeof(T) == 1) return as_type<T>((uchar)word);
  else return *(const LILY_CONSTANT T *)(base + 32 * n);
}
template <uint n> LILY_INLINE bool lily_constant_defined() {
  uint word;
  asm("movl %c2(%1), %0" : "=r"(word) : "r"(lily_constants()), "i"(32 * n + 16));
  return word != 0;
}

// A function-scope threadgroup variable: placed at its first use in a dispatch, with a record of its size.
template <class T> LILY_INLINE ulong lily_threadgroup(uint number) {
  const ulong address = lily_worker()->threadgroup_object[number];
  return address ? address : lily_engine_table.threadgroup(number, sizeof(T), alignof(T));
}
#define LILY_THREADGROUP(number, name, ...)                                                                      \
  using lily_type_##name = __VA_ARGS__;                                                                          \
  asm volatile("1:\n\t.pushsection lily_threadgroup,\"a\",@progbits\n\t.long 1b - ., %c0, %c1\n\t.popsection"    \
               :: "i"(number), "i"(sizeof(lily_type_##name)));                                                   \
  __local lily_type_##name &name = *(__local lily_type_##name *)lily_threadgroup<lily_type_##name>(number);
