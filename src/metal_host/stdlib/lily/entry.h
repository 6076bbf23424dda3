// Arguments of the generated entry functions, and what the module says about each kernel.
#pragma once

// An address that becomes a pointer or reference of the parameter's type.
struct LilyAddress {
  ulong address;
  template <class T> LILY_INLINE operator LILY_DEVICE T *() const { return (LILY_DEVICE T *)address; }
  template <class T> LILY_INLINE operator LILY_CONSTANT T *() const { return (LILY_CONSTANT T *)address; }
  template <class T> LILY_INLINE operator LILY_LOCAL T *() const { return (LILY_LOCAL T *)address; }
  template <class T> LILY_INLINE operator LILY_DEVICE T &() const { return *(LILY_DEVICE T *)present(); }
  template <class T> LILY_INLINE operator LILY_CONSTANT T &() const { return *(LILY_CONSTANT T *)present(); }
  template <class T> LILY_INLINE operator LILY_LOCAL T &() const { return *(LILY_LOCAL T *)present(); }
  LILY_INLINE ulong present() const { return address ? address : lily_worker()->zeros; }
};

struct LilyPosition {
  uint x, y, z;
  LILY_INLINE operator uint() const { return x; }
  LILY_INLINE operator ushort() const { return (ushort)x; }
  LILY_INLINE operator metal::vec<uint, 2>() const { return metal::vec<uint, 2>(x, y); }
  LILY_INLINE operator metal::vec<uint, 3>() const { return metal::vec<uint, 3>(x, y, z); }
  LILY_INLINE operator metal::vec<ushort, 2>() const { return metal::vec<ushort, 2>((ushort)x, (ushort)y); }
  LILY_INLINE operator metal::vec<ushort, 3>() const { return metal::vec<ushort, 3>((ushort)x, (ushort)y, (ushort)z); }
};
#define LILY_THREE(a) LilyPosition{thread->a[0], thread->a[1], thread->a[2]}

#define LILY_ARGUMENT_buffer(i) LilyAddress{((const LilyBindingWords *)thread->buffers)[i].address}
#define LILY_ARGUMENT_threadgroup(i) LilyAddress{((const ulong *)thread->threadgroup_arguments)[i]}
#define LILY_ARGUMENT_thread_position_in_grid                                    \
  LilyPosition{thread->group[0] * thread->nominal[0] + thread->position[0],      \
               thread->group[1] * thread->nominal[1] + thread->position[1],      \
               thread->group[2] * thread->nominal[2] + thread->position[2]}
#define LILY_ARGUMENT_thread_position_in_threadgroup LILY_THREE(position)
#define LILY_ARGUMENT_threadgroup_position_in_grid LILY_THREE(group)
#define LILY_ARGUMENT_threads_per_threadgroup LILY_THREE(size)
#define LILY_ARGUMENT_dispatch_threads_per_threadgroup LILY_THREE(nominal)
#define LILY_ARGUMENT_threads_per_grid LILY_THREE(grid)
#define LILY_ARGUMENT_threadgroups_per_grid LILY_THREE(groups)
#define LILY_ARGUMENT_thread_index_in_threadgroup (thread->index)
#define LILY_ARGUMENT_thread_index_in_simdgroup (thread->index & 31u)
#define LILY_ARGUMENT_simdgroup_index_in_threadgroup (thread->index >> 5)
#define LILY_ARGUMENT_simdgroups_per_threadgroup (thread->simdgroups)
#define LILY_ARGUMENT_threads_per_simdgroup 32u
#define LILY_ARGUMENT_thread_execution_width 32u
#define LILY_ARGUMENT_thread_index_in_quadgroup (thread->index & 3u)
#define LILY_ARGUMENT_quadgroup_index_in_threadgroup (thread->index >> 2)

// Size and alignment of what each parameter points to, for the host's checks of bindings.
template <class T> struct lily_pointee { static constexpr __constant uint size = 0, align = 1; };
#define LILY_POINTEE(space)                                                                                                     \
  template <class T> struct lily_pointee<space T *> { static constexpr __constant uint size = sizeof(T), align = alignof(T); }; \
  template <class T> struct lily_pointee<space T &> { static constexpr __constant uint size = sizeof(T), align = alignof(T); };
LILY_POINTEE(LILY_DEVICE) LILY_POINTEE(LILY_CONSTANT) LILY_POINTEE(LILY_LOCAL)
#undef LILY_POINTEE
template <class F> struct lily_signature;
template <class... A> struct lily_signature<void(A...)> {
  struct Facts { uint words[1 + sizeof...(A)]; };          // thread limit, then per parameter: size | alignment << 24
  static constexpr Facts facts(uint max_threads) { return Facts{{max_threads, (lily_pointee<A>::size | lily_pointee<A>::align << 24)...}}; }
};
#define LILY_DESCRIBE(n, max_threads, ...) \
  extern "C" { extern const __constant lily_signature<__VA_ARGS__>::Facts lily_facts_##n = lily_signature<__VA_ARGS__>::facts(max_threads); }
