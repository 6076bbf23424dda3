// <metal_atomic>: relaxed atomics on device and threadgroup memory.
#pragma once
// The compiler predeclares OpenCL's names: take them over.
#define atomic_int lily_atomic_int
#define atomic_uint lily_atomic_uint
#define atomic_float lily_atomic_float
#define atomic_ulong lily_atomic_ulong

namespace metal {
enum memory_order { memory_order_relaxed = 0, memory_order_acquire = 2, memory_order_release = 3, memory_order_acq_rel = 4, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
LILY_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {}

template <class T> struct atomic { T value; };
template <class T> using _atomic = atomic<T>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;
}  // namespace metal

template <class T> struct lily_bits { using type = T; };
template <> struct lily_bits<float> { using type = uint; };

struct lily_exchange_op { template <class T> static LILY_INLINE T apply(T, T b) { return b; } };
struct lily_subtract { template <class T> static LILY_INLINE T apply(T a, T b) { return a - b; } };
struct lily_lesser { template <class T> static LILY_INLINE T apply(T a, T b) { return b < a ? b : a; } };
struct lily_greater { template <class T> static LILY_INLINE T apply(T a, T b) { return a < b ? b : a; } };

template <class T, class Op> LILY_INLINE T lily_update(volatile T *address, T operand) {
  using B = typename lily_bits<T>::type;
  volatile B *p = (volatile B *)address;
  B old = __atomic_load_n(p, __ATOMIC_RELAXED);
  for (;;) {
    const T value = as_type<T>(old);
    if (__atomic_compare_exchange_n(p, &old, as_type<B>((T)Op::apply(value, operand)), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return value;
  }
}

namespace metal {
#define LILY_ATOMIC_UPDATE(space, name, op)                                                                        \
  template <class T> LILY_INLINE T atomic_##name##_explicit(volatile space atomic<T> *a, lily_same_t<T> x, memory_order) { \
    return lily_update<T, op>((volatile T *)&a->value, x);                                                         \
  }
#define LILY_ATOMICS(space)                                                                                        \
  LILY_ATOMIC_UPDATE(space, fetch_add, lily_add) LILY_ATOMIC_UPDATE(space, fetch_sub, lily_subtract)               \
  LILY_ATOMIC_UPDATE(space, fetch_min, lily_lesser) LILY_ATOMIC_UPDATE(space, fetch_max, lily_greater)             \
  LILY_ATOMIC_UPDATE(space, fetch_and, lily_and) LILY_ATOMIC_UPDATE(space, fetch_or, lily_or)                      \
  LILY_ATOMIC_UPDATE(space, fetch_xor, lily_xor) LILY_ATOMIC_UPDATE(space, exchange, lily_exchange_op)             \
  template <class T> LILY_INLINE T atomic_load_explicit(const volatile space atomic<T> *a, memory_order) {         \
    using B = typename lily_bits<T>::type;                                                                         \
    return as_type<T>(__atomic_load_n((const volatile B *)&a->value, __ATOMIC_RELAXED));                           \
  }                                                                                                                \
  template <class T> LILY_INLINE void atomic_store_explicit(volatile space atomic<T> *a, lily_same_t<T> x, memory_order) { \
    using B = typename lily_bits<T>::type;                                                                         \
    __atomic_store_n((volatile B *)&a->value, as_type<B>(x), __ATOMIC_RELAXED);                                    \
  }                                                                                                                \
  template <class T> LILY_INLINE bool atomic_compare_exchange_weak_explicit(volatile space atomic<T> *a, __private T *expected, lily_same_t<T> x, memory_order, memory_order) { \
    using B = typename lily_bits<T>::type;                                                                         \
    B old = as_type<B>(*expected);                                                                                 \
    const bool done = __atomic_compare_exchange_n((volatile B *)&a->value, &old, as_type<B>(x), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
    *expected = as_type<T>(old);                                                                                   \
    return done;                                                                                                   \
  }
LILY_ATOMICS(LILY_DEVICE)
LILY_ATOMICS(LILY_LOCAL)
#undef LILY_ATOMICS
#undef LILY_ATOMIC_UPDATE
}  // namespace metal
