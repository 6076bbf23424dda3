// <metal_type_traits>, as far as kernels use it.
#pragma once
struct bfloat;

namespace metal {
using LILY_ROOT::bfloat;

template <class T, T v> struct integral_constant {
  static constexpr __constant T value = v;
  constexpr LILY_INLINE operator T() const { return v; }
};
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool b, class A, class B> using conditional_t = typename conditional<b, A, B>::type;

template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> struct remove_cv { using type = typename remove_volatile<typename remove_const<T>::type>::type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;

template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> static constexpr __constant bool is_same_v = is_same<A, B>::value;

// 1 signed integer, 2 unsigned integer, 3 floating point
template <class T> struct lily_kind { static constexpr __constant int value = 0; };
#define LILY_KIND(T, k) template <> struct lily_kind<T> { static constexpr __constant int value = k; };
LILY_KIND(bool, 2) LILY_KIND(char, 1) LILY_KIND(signed char, 1) LILY_KIND(uchar, 2)
LILY_KIND(short, 1) LILY_KIND(ushort, 2) LILY_KIND(int, 1) LILY_KIND(uint, 2) LILY_KIND(long, 1) LILY_KIND(ulong, 2)
LILY_KIND(half, 3) LILY_KIND(float, 3) LILY_KIND(bfloat, 3)

template <class T> static constexpr __constant bool is_integral_v = lily_kind<T>::value == 1 || lily_kind<T>::value == 2;
template <class T> static constexpr __constant bool is_floating_point_v = lily_kind<T>::value == 3;
template <class T> static constexpr __constant bool is_arithmetic_v = lily_kind<T>::value != 0;
template <class T> static constexpr __constant bool is_signed_v = lily_kind<T>::value == 1 || lily_kind<T>::value == 3;
template <class T> static constexpr __constant bool is_unsigned_v = lily_kind<T>::value == 2;
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};

template <class T> struct make_unsigned { using type = T; };
template <> struct make_unsigned<char> { using type = uchar; };
template <> struct make_unsigned<short> { using type = ushort; };
template <> struct make_unsigned<int> { using type = uint; };
template <> struct make_unsigned<long> { using type = ulong; };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;

// A parameter type that is not deduced.
template <class T> struct lily_identity { using type = T; };
template <class T> using lily_same_t = typename lily_identity<T>::type;
}  // namespace metal
