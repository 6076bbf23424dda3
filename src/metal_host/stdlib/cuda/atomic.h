// <metal_atomic>: relaxed atomics on device and threadgroup memory.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed = 0, memory_order_acquire = 2, memory_order_release = 3, memory_order_acq_rel = 4, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
LILY_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope scope = thread_scope_device) {
  if (scope == thread_scope_device) __threadfence();
  else __threadfence_block();
}

template <class T> struct atomic { T value; };
template <class T> using _atomic = atomic<T>;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
using atomic_ulong = atomic<ulong>;
}  // namespace metal

// The type that CUDA's atomic functions know for T.
template <class T> struct lily_atomic_type { using type = T; using bits = T; };
template <> struct lily_atomic_type<float> { using type = float; using bits = uint; };
template <> struct lily_atomic_type<ulong> { using type = unsigned long long; using bits = unsigned long long; };
template <class T> LILY_INLINE typename lily_atomic_type<T>::type *lily_atomic_address(volatile metal::atomic<T> *a) {
  return (typename lily_atomic_type<T>::type *)&a->value;
}

namespace metal {
#define LILY_ATOMIC_UPDATE(name, expression)                                                                  \
  template <class T> LILY_INLINE T atomic_##name##_explicit(volatile atomic<T> *a, lily_same_t<T> x, memory_order) { \
    return (T)expression;                                                                                     \
  }
LILY_ATOMIC_UPDATE(fetch_add, ::atomicAdd(lily_atomic_address(a), x))
LILY_ATOMIC_UPDATE(fetch_sub, ::atomicAdd(lily_atomic_address(a), -x))
LILY_ATOMIC_UPDATE(fetch_min, ::atomicMin(lily_atomic_address(a), x))
LILY_ATOMIC_UPDATE(fetch_max, ::atomicMax(lily_atomic_address(a), x))
LILY_ATOMIC_UPDATE(fetch_and, ::atomicAnd(lily_atomic_address(a), x))
LILY_ATOMIC_UPDATE(fetch_or, ::atomicOr(lily_atomic_address(a), x))
LILY_ATOMIC_UPDATE(fetch_xor, ::atomicXor(lily_atomic_address(a), x))
LILY_ATOMIC_UPDATE(exchange, ::atomicExch(lily_atomic_address(a), x))
#undef LILY_ATOMIC_UPDATE
template <class T> LILY_INLINE T atomic_load_explicit(const volatile atomic<T> *a, memory_order) { return a->value; }
template <class T> LILY_INLINE void atomic_store_explicit(volatile atomic<T> *a, lily_same_t<T> x, memory_order) { a->value = x; }
template <class T> LILY_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T> *a, T *expected, lily_same_t<T> x, memory_order, memory_order) {
  using B = typename lily_atomic_type<T>::bits;
  const B old = ::atomicCAS((B *)&a->value, as_type<B>(*expected), as_type<B>(x));
  const bool done = old == as_type<B>(*expected);
  *expected = as_type<T>(old);
  return done;
}
}  // namespace metal
