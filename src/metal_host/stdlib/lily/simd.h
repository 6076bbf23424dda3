// <metal_simdgroup>, <metal_compute>: barriers and the operations by which lanes of a simdgroup exchange
// values. An operation writes the lane's value as 32-bit words, waits for the others, and reads theirs; a
// reduction is computed once, by the lane that arrived last.
#pragma once

template <class T> constexpr __constant uint lily_words_of = (sizeof(T) + 3) / 4;

template <class T> LILY_INLINE void lily_write(T value) {
  static_assert(sizeof(T) <= 16, "this type is too large for a simd operation");
  uint words[4] = {0, 0, 0, 0};
  __builtin_memcpy(words, &value, sizeof(T));
  LilyExchange *in = lily_in();
  const uint lane = lily_lane();
  LILY_UNROLL for (uint w = 0; w < lily_words_of<T>; w++) in->words[w][lane] = words[w];
}
template <class T> LILY_INLINE T lily_read(const LilyExchange *out, uint lane) {
  uint words[4];
  LILY_UNROLL for (uint w = 0; w < lily_words_of<T>; w++) words[w] = out->words[w][lane];
  T value;
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}
// Writes, waits, and returns whether this lane is the leader.
template <class T> LILY_INLINE bool lily_exchange(T value, uint site) {
  lily_write(value);
  return lily_engine_table.rendezvous(site) != 0;
}
template <class T> LILY_INLINE T lily_read_checked(uint lane) {
  const LilyExchange *out = lily_out();
#if LILY_STRICT
  if (!(out->mask >> lane & 1)) lily_engine_table.fail((ulong) "a simd shuffle reads a lane that does not take part");
#endif
  return lily_read<T>(out, lane);
}

// ------------------------------------------------------------------------------------ reductions
typedef float lily_float16 __attribute__((ext_vector_type(16)));
typedef int lily_int16 __attribute__((ext_vector_type(16)));
typedef uint lily_uint16 __attribute__((ext_vector_type(16)));
template <class T> struct lily_wide;
template <> struct lily_wide<float> { using type = lily_float16; };
template <> struct lily_wide<int> { using type = lily_int16; };
template <> struct lily_wide<uint> { using type = lily_uint16; };

struct lily_add { template <class T> static LILY_INLINE T apply(T a, T b) { return a + b; } };
struct lily_multiply { template <class T> static LILY_INLINE T apply(T a, T b) { return a * b; } };
struct lily_minimum { template <class T> static LILY_INLINE T apply(T a, T b) { return __builtin_elementwise_min(a, b); } };
struct lily_maximum { template <class T> static LILY_INLINE T apply(T a, T b) { return __builtin_elementwise_max(a, b); } };
struct lily_and { template <class T> static LILY_INLINE T apply(T a, T b) { return a & b; } };
struct lily_or { template <class T> static LILY_INLINE T apply(T a, T b) { return a | b; } };
struct lily_xor { template <class T> static LILY_INLINE T apply(T a, T b) { return a ^ b; } };

// Reduces word w of all lanes as T. Pairs at distance 16, 8, 4, 2, 1: the rounding of a tree.
template <class T, class Op> LILY_INLINE void lily_reduce_word(LilyExchange *out, uint w) {
  if (out->mask == 0xffffffffu) {
    using Wide = typename lily_wide<T>::type;
    const Wide *halves = (const Wide *)out->words[w];
    const Wide a = Op::apply(halves[0], halves[1]);
    const auto b = Op::apply(a.lo, a.hi);
    const auto c = Op::apply(b.lo, b.hi);
    const auto d = Op::apply(c.lo, c.hi);
    out->result[w] = as_type<uint>(Op::apply(d.x, d.y));
    return;
  }
  bool first = true;
  T sum = 0;
  for (uint m = out->mask; m; m &= m - 1) {
    const T value = as_type<T>(out->words[w][__builtin_ctz(m)]);
    sum = first ? value : Op::apply(sum, value);
    first = false;
  }
  out->result[w] = as_type<uint>(sum);
}
template <class T, class Op, uint words> __attribute__((noinline)) static void lily_reduce(LilyExchange *out) {
  LILY_UNROLL for (uint w = 0; w < words; w++) lily_reduce_word<T, Op>(out, w);
}

// Type in which T is reduced: float for floating point, 32-bit integers for the rest.
template <class T> using lily_reduced_t =
    metal::conditional_t<metal::is_floating_point_v<T>, float, metal::conditional_t<metal::is_signed_v<T>, int, uint>>;

template <class T, class Op> LILY_INLINE T lily_reduction(T value, uint site) {
  static_assert(sizeof(T) <= 4, "64-bit simd reductions are not offered");
  using R = lily_reduced_t<T>;
  if (lily_exchange((R)value, site)) lily_reduce<R, Op, 1>(lily_out());
  return (T)as_type<R>(lily_out()->result[0]);
}
template <class T, int N, class Op> LILY_INLINE metal::vec<T, N> lily_reduction(metal::vec<T, N> value, uint site) {
  using R = lily_reduced_t<T>;
  LilyExchange *in = lily_in();
  const uint lane = lily_lane();
  LILY_UNROLL for (int i = 0; i < N; i++) in->words[i][lane] = as_type<uint>((R)value.d[i]);
  if (lily_engine_table.rendezvous(site)) lily_reduce<R, Op, N>(lily_out());
  const LilyExchange *out = lily_out();
  LILY_UNROLL for (int i = 0; i < N; i++) value.d[i] = (T)as_type<R>(out->result[i]);
  return value;
}

// Replaces word 0 of every lane by the sum of the lanes before it (and itself when inclusive).
template <class T, class Op> __attribute__((noinline)) static void lily_scan(LilyExchange *out, T start, bool inclusive) {
  T sum = start;
  for (uint m = out->mask; m; m &= m - 1) {
    const uint lane = __builtin_ctz(m);
    const T before = sum;
    sum = Op::apply(sum, as_type<T>(out->words[0][lane]));
    out->words[0][lane] = as_type<uint>(inclusive ? sum : before);
  }
}
template <class T, class Op> LILY_INLINE T lily_prefix(T value, T start, bool inclusive, uint site) {
  static_assert(sizeof(T) <= 4, "64-bit simd prefix operations are not offered");
  using R = lily_reduced_t<T>;
  if (lily_exchange((R)value, site)) lily_scan<R, Op>(lily_out(), (R)start, inclusive);
  return (T)lily_read<R>(lily_out(), lily_lane());
}
__attribute__((noinline)) static void lily_vote(LilyExchange *out) {
  uint votes = 0;
  for (uint lane = 0; lane < 32; lane++) votes |= (out->words[0][lane] & 1u) << lane;
  out->result[0] = votes & out->mask;
}
LILY_INLINE uint lily_ballot(bool vote, uint site) {
  if (lily_exchange((uint)vote, site)) lily_vote(lily_out());
  return lily_out()->result[0];
}

namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
constexpr LILY_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }

LILY_INLINE void threadgroup_barrier(mem_flags, LILY_SITE) { lily_engine_table.rendezvous(site | LILY_BARRIER_SITE); }
LILY_INLINE void simdgroup_barrier(mem_flags, LILY_SITE) { lily_engine_table.rendezvous(site); }

#define LILY_SIMD_REDUCTION(name, op)                                                                       \
  template <class T, class = enable_if_t<is_arithmetic_v<T>>> LILY_INLINE T name(T v, LILY_SITE) { return lily_reduction<T, op>(v, site); } \
  template <class T, int N> LILY_INLINE vec<T, N> name(vec<T, N> v, LILY_SITE) { return lily_reduction<T, N, op>(v, site); }
LILY_SIMD_REDUCTION(simd_sum, lily_add) LILY_SIMD_REDUCTION(simd_product, lily_multiply) LILY_SIMD_REDUCTION(simd_min, lily_minimum)
LILY_SIMD_REDUCTION(simd_max, lily_maximum) LILY_SIMD_REDUCTION(simd_and, lily_and) LILY_SIMD_REDUCTION(simd_or, lily_or)
LILY_SIMD_REDUCTION(simd_xor, lily_xor)
#undef LILY_SIMD_REDUCTION

template <class T> LILY_INLINE T simd_prefix_inclusive_sum(T v, LILY_SITE) { return lily_prefix<T, lily_add>(v, (T)0, true, site); }
template <class T> LILY_INLINE T simd_prefix_exclusive_sum(T v, LILY_SITE) { return lily_prefix<T, lily_add>(v, (T)0, false, site); }
template <class T> LILY_INLINE T simd_prefix_inclusive_product(T v, LILY_SITE) { return lily_prefix<T, lily_multiply>(v, (T)1, true, site); }
template <class T> LILY_INLINE T simd_prefix_exclusive_product(T v, LILY_SITE) { return lily_prefix<T, lily_multiply>(v, (T)1, false, site); }

// `source` may use lane (own lane) and the operation's arguments; `own` says when the value is unchanged.
#define LILY_SIMD_SHUFFLE(name, own, source)                                            \
  template <class T> LILY_INLINE T name(T v, ushort n, LILY_SITE) {                     \
    lily_exchange(v, site);                                                             \
    const uint lane = lily_lane();                                                      \
    (void)lane;                                                                         \
    if (own) return v;                                                                  \
    return lily_read_checked<T>((source) & 31);                                         \
  }
LILY_SIMD_SHUFFLE(simd_shuffle, false, n)
LILY_SIMD_SHUFFLE(simd_broadcast, false, n)
LILY_SIMD_SHUFFLE(simd_shuffle_xor, false, lane ^ n)
LILY_SIMD_SHUFFLE(simd_shuffle_up, lane < n, lane - n)
LILY_SIMD_SHUFFLE(simd_shuffle_down, lane + n > 31, lane + n)
LILY_SIMD_SHUFFLE(simd_shuffle_rotate_up, false, lane - n)
LILY_SIMD_SHUFFLE(simd_shuffle_rotate_down, false, lane + n)
LILY_SIMD_SHUFFLE(quad_shuffle_xor, false, (lane & ~3u) | ((lane ^ n) & 3))
LILY_SIMD_SHUFFLE(quad_broadcast, false, (lane & ~3u) | (n & 3))
LILY_SIMD_SHUFFLE(quad_shuffle, false, (lane & ~3u) | (n & 3))
#undef LILY_SIMD_SHUFFLE
template <class T> LILY_INLINE T simd_shuffle_and_fill_up(T v, T fill, ushort n, LILY_SITE) {
  const T other = simd_shuffle_rotate_up(v, n, site), filled = simd_shuffle_rotate_up(fill, n, site);
  return lily_lane() < n ? filled : other;
}
template <class T> LILY_INLINE T simd_shuffle_and_fill_down(T v, T fill, ushort n, LILY_SITE) {
  const T other = simd_shuffle_rotate_down(v, n, site), filled = simd_shuffle_rotate_down(fill, n, site);
  return lily_lane() + n > 31 ? filled : other;
}
template <class T> LILY_INLINE T simd_broadcast_first(T v, LILY_SITE) {
  lily_exchange(v, site);
  const LilyExchange *out = lily_out();
  return lily_read<T>(out, __builtin_ctz(out->mask));
}
template <class T> LILY_INLINE T quad_sum(T v, LILY_SITE) {
  v = v + quad_shuffle_xor(v, 1, site);
  return v + quad_shuffle_xor(v, 2, site);
}
template <class T> LILY_INLINE T quad_max(T v, LILY_SITE) {
  v = max(v, quad_shuffle_xor(v, 1, site));
  return max(v, quad_shuffle_xor(v, 2, site));
}

struct simd_vote {
  using vote_t = ulong;
  ulong votes;
  explicit LILY_INLINE simd_vote(ulong v = 0) : votes(v) {}
  explicit LILY_INLINE operator vote_t() const { return votes; }
  LILY_INLINE bool all() const { return votes == 0xffffffffu; }
  LILY_INLINE bool any() const { return votes != 0; }
};
LILY_INLINE simd_vote simd_ballot(bool p, LILY_SITE) { return simd_vote(lily_ballot(p, site)); }
LILY_INLINE bool simd_any(bool p, LILY_SITE) { return lily_ballot(p, site) != 0; }
LILY_INLINE bool simd_all(bool p, LILY_SITE) { return lily_ballot(!p, site) == 0; }
LILY_INLINE bool simd_is_first(LILY_SITE) { lily_exchange(0u, site); return (uint)__builtin_ctz(lily_out()->mask) == lily_lane(); }
LILY_INLINE simd_vote simd_active_threads_mask(LILY_SITE) { lily_exchange(0u, site); return simd_vote(lily_out()->mask); }
}  // namespace metal
