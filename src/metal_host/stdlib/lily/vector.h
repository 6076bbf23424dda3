// Vector types: vec<T, N> with Metal's constructors, swizzles and element-wise operators, and packed_vec.
#pragma once
namespace metal {
template <class T, int N> struct vec;

// v.xyz as a value and as a target of assignment.
template <class V, class T, int... I> struct lily_swizzle {
  T d[4];
  LILY_INLINE operator V() const { return V(d[I]...); }
  LILY_INLINE lily_swizzle &operator=(V other) {
    int j = 0;
    ((d[I] = other[j++]), ...);
    return *this;
  }
  LILY_INLINE lily_swizzle &operator+=(V o) { return *this = V(*this) + o; }
  LILY_INLINE lily_swizzle &operator-=(V o) { return *this = V(*this) - o; }
  LILY_INLINE lily_swizzle &operator*=(V o) { return *this = V(*this) * o; }
};

#define LILY_EACH _Pragma("unroll") for (int i = 0; i < N; i++)
#define LILY_ASSIGN(op) \
  LILY_INLINE vec &operator op##=(vec o) { LILY_EACH d[i] = (T)(d[i] op o.d[i]); return *this; }
#define LILY_BINARY(op) \
  friend LILY_INLINE vec operator op(vec a, vec b) { vec r; LILY_EACH r.d[i] = (T)(a.d[i] op b.d[i]); return r; }
#define LILY_INTEGER(op)                                                                             \
  template <class U> friend LILY_INLINE enable_if_t<is_integral_v<T> && (sizeof(U) > 0), vec> operator op(vec a, U other) { \
    const vec b(other);                                                                              \
    vec r;                                                                                           \
    LILY_EACH r.d[i] = (T)(a.d[i] op b.d[i]);                                                        \
    return r;                                                                                        \
  }
#define LILY_COMPARE(op) \
  friend LILY_INLINE vec<bool, N> operator op(vec a, vec b) { vec<bool, N> r; LILY_EACH r.d[i] = a.d[i] op b.d[i]; return r; }
#define LILY_VECTOR_MEMBERS(n)                                                                       \
  static constexpr __constant int N = n;                                                             \
  vec() = default;                                                                                   \
  LILY_INLINE T &operator[](int i) { return d[i]; }                                                  \
  LILY_INLINE T operator[](int i) const { return LILY_ELEMENT(n, d, i); }                            \
  LILY_ASSIGN(+) LILY_ASSIGN(-) LILY_ASSIGN(*) LILY_ASSIGN(/)                                         \
  LILY_BINARY(+) LILY_BINARY(-) LILY_BINARY(*) LILY_BINARY(/)                                         \
  LILY_INTEGER(%) LILY_INTEGER(&) LILY_INTEGER(|) LILY_INTEGER(^) LILY_INTEGER(<<) LILY_INTEGER(>>)   \
  LILY_COMPARE(==) LILY_COMPARE(!=) LILY_COMPARE(<) LILY_COMPARE(<=) LILY_COMPARE(>) LILY_COMPARE(>=) \
  friend LILY_INLINE vec operator-(vec a) { vec r; LILY_EACH r.d[i] = (T)(-a.d[i]); return r; }       \
  template <class U> LILY_INLINE vec &operator&=(U o) { return *this = *this & o; }                  \
  template <class U> LILY_INLINE vec &operator|=(U o) { return *this = *this | o; }                  \
  template <class U> LILY_INLINE vec &operator^=(U o) { return *this = *this ^ o; }                  \
  template <class U> LILY_INLINE vec &operator<<=(U o) { return *this = *this << o; }                \
  template <class U> LILY_INLINE vec &operator>>=(U o) { return *this = *this >> o; }
#define LILY_OTHER(n) template <class U, class = enable_if_t<!is_same_v<U, T>>> constexpr explicit LILY_INLINE vec(vec<U, n> o)
#define LILY_SWIZZLE(n, ...) lily_swizzle<vec<T, n>, T, __VA_ARGS__>

template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T d[2];
    struct { T x, y; };
    struct { T r, g; };
  };
  constexpr LILY_INLINE vec(T s) : x(s), y(s) {}
  constexpr LILY_INLINE vec(T a, T b) : x(a), y(b) {}
  LILY_OTHER(2) : x((T)o.x), y((T)o.y) {}
  LILY_VECTOR_MEMBERS(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T d[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
    LILY_SWIZZLE(2, 0, 1) xy;
    LILY_SWIZZLE(2, 1, 2) yz;
    LILY_SWIZZLE(2, 0, 2) xz;
  };
  constexpr LILY_INLINE vec(T s) : x(s), y(s), z(s) {}
  constexpr LILY_INLINE vec(T a, T b_, T c) : x(a), y(b_), z(c) {}
  constexpr LILY_INLINE vec(vec<T, 2> a, T c) : x(a.x), y(a.y), z(c) {}
  constexpr LILY_INLINE vec(T a, vec<T, 2> b_) : x(a), y(b_.x), z(b_.y) {}
  LILY_OTHER(3) : x((T)o.x), y((T)o.y), z((T)o.z) {}
  LILY_VECTOR_MEMBERS(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T d[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    LILY_SWIZZLE(2, 0, 1) xy;
    LILY_SWIZZLE(2, 2, 3) zw;
    LILY_SWIZZLE(2, 1, 2) yz;
    LILY_SWIZZLE(2, 0, 2) xz;
    LILY_SWIZZLE(2, 1, 3) yw;
    LILY_SWIZZLE(3, 0, 1, 2) xyz;
    LILY_SWIZZLE(3, 1, 2, 3) yzw;
    LILY_SWIZZLE(3, 0, 1, 2) rgb;
  };
  constexpr LILY_INLINE vec(T s) : x(s), y(s), z(s), w(s) {}
  constexpr LILY_INLINE vec(T a_, T b_, T c_, T e_) : x(a_), y(b_), z(c_), w(e_) {}
  constexpr LILY_INLINE vec(vec<T, 2> p, vec<T, 2> q) : x(p.x), y(p.y), z(q.x), w(q.y) {}
  constexpr LILY_INLINE vec(vec<T, 2> p, T c, T e) : x(p.x), y(p.y), z(c), w(e) {}
  constexpr LILY_INLINE vec(T c, T e, vec<T, 2> p) : x(c), y(e), z(p.x), w(p.y) {}
  constexpr LILY_INLINE vec(vec<T, 3> p, T e) : x(p.x), y(p.y), z(p.z), w(e) {}
  constexpr LILY_INLINE vec(T c, vec<T, 3> p) : x(c), y(p.x), z(p.y), w(p.z) {}
  LILY_OTHER(4) : x((T)o.x), y((T)o.y), z((T)o.z), w((T)o.w) {}
  LILY_VECTOR_MEMBERS(4)
};

// The same without alignment.
template <class T, int N> struct packed_vec {
  T d[N];
  packed_vec() = default;
  LILY_INLINE packed_vec(vec<T, N> v) { LILY_EACH d[i] = v[i]; }
  LILY_INLINE operator vec<T, N>() const { vec<T, N> r; LILY_EACH r[i] = d[i]; return r; }
  LILY_INLINE T &operator[](int i) { return d[i]; }
  LILY_INLINE T operator[](int i) const { return d[i]; }
};

#define LILY_NAMES(T)                        \
  using T##2 = vec<T, 2>;                    \
  using T##3 = vec<T, 3>;                    \
  using T##4 = vec<T, 4>;                    \
  using packed_##T##2 = packed_vec<T, 2>;    \
  using packed_##T##3 = packed_vec<T, 3>;    \
  using packed_##T##4 = packed_vec<T, 4>;
LILY_NAMES(bool) LILY_NAMES(char) LILY_NAMES(uchar) LILY_NAMES(short) LILY_NAMES(ushort) LILY_NAMES(int) LILY_NAMES(uint)
LILY_NAMES(long) LILY_NAMES(ulong) LILY_NAMES(half) LILY_NAMES(bfloat) LILY_NAMES(float)
#undef LILY_NAMES

template <class T, size_t N> struct array {
  T d[N];
  LILY_INLINE T &operator[](size_t i) { return d[i]; }
  LILY_INLINE T operator[](size_t i) const { return d[i]; }
  static constexpr LILY_INLINE size_t size() { return N; }
};

template <int N> LILY_INLINE bool all(vec<bool, N> v) { bool r = true; LILY_EACH r = r && v.d[i]; return r; }
template <int N> LILY_INLINE bool any(vec<bool, N> v) { bool r = false; LILY_EACH r = r || v.d[i]; return r; }
static_assert(sizeof(vec<float, 2>) == 8 && sizeof(vec<float, 3>) == 16 && sizeof(vec<float, 4>) == 16 && sizeof(vec<bfloat, 2>) == 4, "vectors have Metal's sizes");
}  // namespace metal
