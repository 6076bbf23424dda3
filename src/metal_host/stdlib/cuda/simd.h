// <metal_simdgroup>, <metal_compute>: a simdgroup is a warp. Operations expect the whole simdgroup; LILY_RAGGED is set by
// the host when a simdgroup may be smaller (edge of a ragged dispatch, a threadgroup that is no multiple of 32), and then
// live lanes are the lowest ones.
#pragma once
LILY_INLINE uint lily_lane() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
#if LILY_RAGGED
LILY_INLINE uint lily_lanes() { return __activemask(); }
#else
LILY_INLINE uint lily_lanes() { return 0xffffffffu; }
#endif

// Applies `exchange` to every 32-bit word of a value.
template <class T, class F> LILY_INLINE T lily_words(T value, F exchange) {
  static_assert(sizeof(T) <= 16, "this type is too large for a simd operation");
  uint words[(sizeof(T) + 3) / 4] = {0};
  ::memcpy(words, &value, sizeof(T));
  LILY_UNROLL for (uint w = 0; w < sizeof(words) / 4; w++) words[w] = exchange(words[w]);
  ::memcpy(&value, words, sizeof(T));
  return value;
}
// Vectors go element by element: copying their unions to words keeps them in memory.
template <class T, int N, class F> LILY_INLINE metal::vec<T, N> lily_words(metal::vec<T, N> value, F exchange) {
  LILY_UNROLL for (int i = 0; i < N; i++) value.d[i] = lily_words(value.d[i], exchange);
  return value;
}

struct lily_add { template <class T> static LILY_INLINE T apply(T a, T b) { return a + b; } };
struct lily_multiply { template <class T> static LILY_INLINE T apply(T a, T b) { return a * b; } };
struct lily_minimum {
  static LILY_INLINE float apply(float a, float b) { return ::fminf(a, b); }
  template <class T> static LILY_INLINE T apply(T a, T b) { return b < a ? b : a; }
};
struct lily_maximum {
  static LILY_INLINE float apply(float a, float b) { return ::fmaxf(a, b); }
  template <class T> static LILY_INLINE T apply(T a, T b) { return a < b ? b : a; }
};
struct lily_and { template <class T> static LILY_INLINE T apply(T a, T b) { return a & b; } };
struct lily_or { template <class T> static LILY_INLINE T apply(T a, T b) { return a | b; } };
struct lily_xor { template <class T> static LILY_INLINE T apply(T a, T b) { return a ^ b; } };

// Type in which T is reduced: float for floating point, 32-bit integers for the rest.
template <class T> using lily_reduced_t =
    metal::conditional_t<metal::is_floating_point_v<T>, float, metal::conditional_t<metal::is_signed_v<T>, int, uint>>;

// Pairs at distance 16, 8, 4, 2, 1: the rounding of a tree, the same as on the CPU.
template <class R, class Op> LILY_INLINE R lily_tree(R value) {
#if LILY_RAGGED
  const uint lanes = lily_lanes(), lane = lily_lane();
  LILY_UNROLL for (uint d = 1; d < 32; d *= 2) {
    const R other = __shfl_xor_sync(lanes, value, d);
    if (lanes >> (lane ^ d) & 1) value = Op::apply(value, other);
  }
  return __shfl_sync(lanes, value, 0);                 // the lowest lane has met all live ones
#else
  LILY_UNROLL for (uint d = 16; d; d /= 2) value = Op::apply(value, __shfl_xor_sync(0xffffffffu, value, d));
  return value;
#endif
}
// Integers have an instruction of their own.
#if __CUDA_ARCH__ >= 800
template <class R, class Op> struct lily_reducer { static LILY_INLINE R run(R v) { return lily_tree<R, Op>(v); } };
#define LILY_REDUCER(R, op, instruction) \
  template <> struct lily_reducer<R, op> { static LILY_INLINE R run(R v) { return instruction(lily_lanes(), v); } };
LILY_REDUCER(int, lily_add, __reduce_add_sync) LILY_REDUCER(uint, lily_add, __reduce_add_sync)
LILY_REDUCER(int, lily_minimum, __reduce_min_sync) LILY_REDUCER(uint, lily_minimum, __reduce_min_sync)
LILY_REDUCER(int, lily_maximum, __reduce_max_sync) LILY_REDUCER(uint, lily_maximum, __reduce_max_sync)
LILY_REDUCER(uint, lily_and, __reduce_and_sync) LILY_REDUCER(uint, lily_or, __reduce_or_sync) LILY_REDUCER(uint, lily_xor, __reduce_xor_sync)
#undef LILY_REDUCER
#else
template <class R, class Op> struct lily_reducer { static LILY_INLINE R run(R v) { return lily_tree<R, Op>(v); } };
#endif
template <class T, class Op> LILY_INLINE T lily_reduction(T value) {
  static_assert(sizeof(T) <= 4, "64-bit simd reductions are not offered");
  using R = lily_reduced_t<T>;
  return (T)lily_reducer<R, Op>::run((R)value);
}
template <class T, class Op> LILY_INLINE T lily_prefix(T value, T start, bool inclusive) {
  static_assert(sizeof(T) <= 4, "64-bit simd prefix operations are not offered");
  using R = lily_reduced_t<T>;
  const uint lanes = lily_lanes(), lane = lily_lane();
  R sum = (R)value;
  LILY_UNROLL for (uint d = 1; d < 32; d *= 2) {
    const R other = __shfl_up_sync(lanes, sum, d);
    if (lane >= d) sum = Op::apply(other, sum);
  }
  if (inclusive) return (T)sum;
  const R before = __shfl_up_sync(lanes, sum, 1);
  return lane == 0 ? start : (T)before;
}

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
constexpr LILY_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }

LILY_INLINE void threadgroup_barrier(mem_flags) { __syncthreads(); }
LILY_INLINE void simdgroup_barrier(mem_flags) { __syncwarp(lily_lanes()); }

#define LILY_SIMD_REDUCTION(name, op)                                                                       \
  template <class T, class = enable_if_t<is_arithmetic_v<T>>> LILY_INLINE T name(T v) { return lily_reduction<T, op>(v); } \
  template <class T, int N> LILY_INLINE vec<T, N> name(vec<T, N> v) { LILY_EACH v.d[i] = lily_reduction<T, op>(v.d[i]); return v; }
LILY_SIMD_REDUCTION(simd_sum, lily_add) LILY_SIMD_REDUCTION(simd_product, lily_multiply) LILY_SIMD_REDUCTION(simd_min, lily_minimum)
LILY_SIMD_REDUCTION(simd_max, lily_maximum) LILY_SIMD_REDUCTION(simd_and, lily_and) LILY_SIMD_REDUCTION(simd_or, lily_or)
LILY_SIMD_REDUCTION(simd_xor, lily_xor)
#undef LILY_SIMD_REDUCTION

template <class T> LILY_INLINE T simd_prefix_inclusive_sum(T v) { return lily_prefix<T, lily_add>(v, (T)0, true); }
template <class T> LILY_INLINE T simd_prefix_exclusive_sum(T v) { return lily_prefix<T, lily_add>(v, (T)0, false); }
template <class T> LILY_INLINE T simd_prefix_inclusive_product(T v) { return lily_prefix<T, lily_multiply>(v, (T)1, true); }
template <class T> LILY_INLINE T simd_prefix_exclusive_product(T v) { return lily_prefix<T, lily_multiply>(v, (T)1, false); }

// `exchange` may use word, n, lane (own lane) and lanes.
#define LILY_SIMD_SHUFFLE(name, exchange)                                               \
  template <class T> LILY_INLINE T name(T v, ushort n) {                                \
    const uint lanes = lily_lanes(), lane = lily_lane();                                \
    (void)lane;                                                                         \
    return lily_words(v, [&](uint word) { return exchange; });                          \
  }
LILY_SIMD_SHUFFLE(simd_shuffle, __shfl_sync(lanes, word, n))
LILY_SIMD_SHUFFLE(simd_broadcast, __shfl_sync(lanes, word, n))
LILY_SIMD_SHUFFLE(simd_shuffle_xor, __shfl_xor_sync(lanes, word, n))
LILY_SIMD_SHUFFLE(simd_shuffle_up, __shfl_up_sync(lanes, word, n))
LILY_SIMD_SHUFFLE(simd_shuffle_down, __shfl_down_sync(lanes, word, n))
LILY_SIMD_SHUFFLE(simd_shuffle_rotate_up, __shfl_sync(lanes, word, (lane - n) & 31))
LILY_SIMD_SHUFFLE(simd_shuffle_rotate_down, __shfl_sync(lanes, word, (lane + n) & 31))
LILY_SIMD_SHUFFLE(quad_shuffle_xor, __shfl_xor_sync(lanes, word, n & 3))
LILY_SIMD_SHUFFLE(quad_broadcast, __shfl_sync(lanes, word, n & 3, 4))
LILY_SIMD_SHUFFLE(quad_shuffle, __shfl_sync(lanes, word, n & 3, 4))
#undef LILY_SIMD_SHUFFLE
template <class T> LILY_INLINE T simd_shuffle_and_fill_up(T v, T fill, ushort n) {
  const T other = simd_shuffle_rotate_up(v, n), filled = simd_shuffle_rotate_up(fill, n);
  return lily_lane() < n ? filled : other;
}
template <class T> LILY_INLINE T simd_shuffle_and_fill_down(T v, T fill, ushort n) {
  const T other = simd_shuffle_rotate_down(v, n), filled = simd_shuffle_rotate_down(fill, n);
  return lily_lane() + n > 31 ? filled : other;
}
template <class T> LILY_INLINE T quad_sum(T v) {
  v = v + quad_shuffle_xor(v, 1);
  return v + quad_shuffle_xor(v, 2);
}
template <class T> LILY_INLINE T quad_max(T v) {
  v = max(v, quad_shuffle_xor(v, 1));
  return max(v, quad_shuffle_xor(v, 2));
}

// Votes and the operations defined by the active lanes, which may be some of the simdgroup.
struct simd_vote {
  using vote_t = ulong;
  ulong votes;
  explicit LILY_INLINE simd_vote(ulong v = 0) : votes(v) {}
  explicit LILY_INLINE operator vote_t() const { return votes; }
  LILY_INLINE bool all() const { return votes == 0xffffffffu; }
  LILY_INLINE bool any() const { return votes != 0; }
};
LILY_INLINE simd_vote simd_ballot(bool p) { return simd_vote(__ballot_sync(lily_lanes(), p)); }
LILY_INLINE bool simd_any(bool p) { return __any_sync(lily_lanes(), p); }
LILY_INLINE bool simd_all(bool p) { return __all_sync(lily_lanes(), p); }
LILY_INLINE simd_vote simd_active_threads_mask() { return simd_vote(__activemask()); }
LILY_INLINE bool simd_is_first() { return (uint)__ffs(__activemask()) - 1 == lily_lane(); }
template <class T> LILY_INLINE T simd_broadcast_first(T v) {
  const uint lanes = __activemask();
  return lily_words(v, [&](uint word) { return __shfl_sync(lanes, word, __ffs(lanes) - 1); });
}
}  // namespace metal
