// The C half of a kernel module: its description, the engine's table, and the few functions that compilers
// expect to exist. The module has no other library, so it must not need one.
#include "engine.h"
#include "kernel_abi.h"

#define LILY_SIZE_bool 1
#define LILY_SIZE_char 1
#define LILY_SIZE_uchar 1
#define LILY_SIZE_short 2
#define LILY_SIZE_ushort 2
#define LILY_SIZE_half 2
#define LILY_SIZE_bfloat 2
#define LILY_SIZE_int 4
#define LILY_SIZE_uint 4
#define LILY_SIZE_int32_t 4
#define LILY_SIZE_uint32_t 4
#define LILY_SIZE_float 4
#define LILY_SIZE_int2 8
#define LILY_SIZE_uint2 8
#define LILY_SIZE_float2 8
#define LILY_SIZE_int4 16
#define LILY_SIZE_uint4 16
#define LILY_SIZE_float4 16

__attribute__((visibility("hidden"))) LilyEngineTable lily_engine_table;
extern const int32_t __start_lily_threadgroup[] __attribute__((weak, visibility("hidden")));
extern const int32_t __stop_lily_threadgroup[] __attribute__((weak, visibility("hidden")));

#define LILY_MODULE(file, strict, entry_count, constant_count)                                                     \
  __attribute__((visibility("default"))) LilyKernelModule lily_kernel_module = {                                   \
      LILY_ENGINE_ABI, strict, file, entries, entry_count, constant_count, constants, &lily_engine_table, 0, 0};   \
  __attribute__((constructor)) static void lily_find_records(void) {                                               \
    lily_kernel_module.threadgroup_records = __start_lily_threadgroup;                                             \
    lily_kernel_module.threadgroup_records_end = __stop_lily_threadgroup;                                          \
  }

// Takes over what only the kernel's compiler knew (LILY_DESCRIBE of stdlib/lily/entry.h).
static void lily_complete_entry(LilyKernelEntry *entry, LilyParameter *parameters, const uint32_t *facts, const int *where) {
  entry->max_threads = facts[0];
  for (uint32_t i = 0; i < entry->parameter_count; i++) {
    parameters[i].element_size = facts[1 + where[i]] & 0xffffff;
    parameters[i].element_align = facts[1 + where[i]] >> 24;
  }
}

// Numbers as in stdlib/lily/math.h.
__attribute__((visibility("hidden"))) float lily_math1(uint32_t which, float x) {
  const LilyMath1 *functions = &lily_engine_table.sin;
  return functions[which](x);
}
__attribute__((visibility("hidden"))) float lily_math2(uint32_t which, float x, float y) {
  const LilyMath2 *functions = &lily_engine_table.pow;
  return functions[which](x, y);
}

__attribute__((visibility("hidden"))) void *memcpy(void *to, const void *from, size_t n) {
  void *start = to;
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
  return start;
}
__attribute__((visibility("hidden"))) void *memset(void *to, int value, size_t n) {
  void *start = to;
  __asm__ volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(value) : "memory");
  return start;
}
__attribute__((visibility("hidden"))) void *memmove(void *to, const void *from, size_t n) {
  if ((uintptr_t)to - (uintptr_t)from >= n) return memcpy(to, from, n);
  for (size_t i = n; i--;) ((char *)to)[i] = ((const char *)from)[i];
  return to;
}

#if LILY_STRICT
// What the instrumentation of a strict build calls before each access.
#define LILY_HOOK __attribute__((visibility("hidden")))
#define LILY_ACCESS(bytes)                                                                                                              \
  LILY_HOOK void __asan_load##bytes##_noabort(uint64_t p) { lily_engine_table.access(p, bytes, 0); }                                    \
  LILY_HOOK void __asan_store##bytes##_noabort(uint64_t p) { lily_engine_table.access(p, bytes, LILY_ACCESS_STORE); }
LILY_ACCESS(1) LILY_ACCESS(2) LILY_ACCESS(4) LILY_ACCESS(8) LILY_ACCESS(16)
LILY_HOOK void __asan_loadN_noabort(uint64_t p, uint64_t bytes) { lily_engine_table.access(p, (uint32_t)bytes, LILY_ACCESS_PACKED); }
LILY_HOOK void __asan_storeN_noabort(uint64_t p, uint64_t bytes) { lily_engine_table.access(p, (uint32_t)bytes, LILY_ACCESS_PACKED | LILY_ACCESS_STORE); }
LILY_HOOK void *__asan_memcpy(void *to, const void *from, size_t n) {
  if (n) __asan_loadN_noabort((uint64_t)from, n), __asan_storeN_noabort((uint64_t)to, n);
  return memcpy(to, from, n);
}
LILY_HOOK void *__asan_memmove(void *to, const void *from, size_t n) {
  if (n) __asan_loadN_noabort((uint64_t)from, n), __asan_storeN_noabort((uint64_t)to, n);
  return memmove(to, from, n);
}
LILY_HOOK void *__asan_memset(void *to, int value, size_t n) {
  if (n) __asan_storeN_noabort((uint64_t)to, n);
  return memset(to, value, n);
}
#endif
