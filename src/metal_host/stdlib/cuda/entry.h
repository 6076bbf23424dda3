// What the host passes to a kernel, and how the generated entry functions read it.
#pragma once

// Filled by src/metal_host/cuda. Arguments by value (constant references that the manifest gives an offset) lie in `bytes`
// when bit i of inline_mask is set; everything else is a device address.
struct LilyLaunch {
  uchar *buffer[31];                   // pointers: the compiler takes them for global memory, as integers it could not
  uint inline_mask;
  uint grid_threads[3];                // threads_per_grid
  uint grid_groups[3];                 // threadgroups_per_grid
  uint threadgroup_offset[8];          // of [[threadgroup(i)]] arguments in dynamic shared memory
  alignas(16) uchar bytes[320];
};
extern __shared__ uint4 lily_dynamic[];

// An address that becomes a pointer or reference of the parameter's type.
struct LilyDevice {
  uchar *address;
  template <class T> LILY_INLINE operator T *() const { return (T *)address; }
  template <class T> LILY_INLINE operator T &() const { return *(T *)address; }
};
struct LilyShared {
  uint offset;
  template <class T> LILY_INLINE operator T *() const { return (T *)((uchar *)lily_dynamic + offset); }
  template <class T> LILY_INLINE operator T &() const { return *(T *)((uchar *)lily_dynamic + offset); }
};
// A copy in registers, wherever the bytes come from.
struct LilyValue {
  const uchar *bytes;
  const uchar *address;
  bool in_launch;
  template <class T> LILY_INLINE operator T() const {
    T value;
    if (in_launch) value = *(const T *)bytes;
    else value = *(const T *)address;
    return value;
  }
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

// A thread's place. At a ragged edge Metal makes the threadgroup smaller and numbers its threads anew; the rest of the
// block has no threads then (`exists`) and leaves before the kernel's body.
struct LilyThread {
  LilyPosition position, size;
  uint index;
  bool exists;
  LILY_INLINE LilyThread(const LilyLaunch &launch) {
#if LILY_RAGGED
    size = LilyPosition{metal::min((uint)blockDim.x, launch.grid_threads[0] - blockIdx.x * blockDim.x),
                        metal::min((uint)blockDim.y, launch.grid_threads[1] - blockIdx.y * blockDim.y),
                        metal::min((uint)blockDim.z, launch.grid_threads[2] - blockIdx.z * blockDim.z)};
    index = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    exists = index < size.x * size.y * size.z;
    position = LilyPosition{index % size.x, index / size.x % size.y, index / (size.x * size.y)};
#else
    size = LilyPosition{blockDim.x, blockDim.y, blockDim.z};
    position = LilyPosition{threadIdx.x, threadIdx.y, threadIdx.z};
    index = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    exists = true;
#endif
  }
  LILY_INLINE uint threads() const { return size.x * size.y * size.z; }
};

#define LILY_ARGUMENT_buffer(i) LilyDevice{launch.buffer[i]}
#define LILY_ARGUMENT_value(i, offset) LilyValue{launch.bytes + offset, launch.buffer[i], (launch.inline_mask >> i & 1u) != 0}
#define LILY_ARGUMENT_threadgroup(i) LilyShared{launch.threadgroup_offset[i]}
#define LILY_ARGUMENT_thread_position_in_grid                                                                    \
  LilyPosition{blockIdx.x * blockDim.x + thread.position.x, blockIdx.y * blockDim.y + thread.position.y, blockIdx.z * blockDim.z + thread.position.z}
#define LILY_ARGUMENT_thread_position_in_threadgroup thread.position
#define LILY_ARGUMENT_threadgroup_position_in_grid LilyPosition{blockIdx.x, blockIdx.y, blockIdx.z}
#define LILY_ARGUMENT_threads_per_threadgroup thread.size
#define LILY_ARGUMENT_dispatch_threads_per_threadgroup LilyPosition{blockDim.x, blockDim.y, blockDim.z}
#define LILY_ARGUMENT_threads_per_grid LilyPosition{launch.grid_threads[0], launch.grid_threads[1], launch.grid_threads[2]}
#define LILY_ARGUMENT_threadgroups_per_grid LilyPosition{gridDim.x, gridDim.y, gridDim.z}
#define LILY_ARGUMENT_thread_index_in_threadgroup thread.index
#define LILY_ARGUMENT_thread_index_in_simdgroup (thread.index & 31u)
#define LILY_ARGUMENT_simdgroup_index_in_threadgroup (thread.index >> 5)
#define LILY_ARGUMENT_simdgroups_per_threadgroup ((thread.threads() + 31) >> 5)
#define LILY_ARGUMENT_threads_per_simdgroup 32u
#define LILY_ARGUMENT_thread_execution_width 32u
#define LILY_ARGUMENT_thread_index_in_quadgroup (thread.index & 3u)
#define LILY_ARGUMENT_quadgroup_index_in_threadgroup (thread.index >> 2)

#define LILY_ENTRY(symbol, max_threads, ...)                                                                          \
  extern "C" __global__ void __launch_bounds__((max_threads) ? (max_threads) : 1024) symbol(const __grid_constant__ LilyLaunch launch) { \
    const LilyThread thread(launch);                                                                                  \
    if (!thread.exists) return;                                                                                       \
    __VA_ARGS__;                                                                                                      \
  }

// A function-scope threadgroup variable.
#define LILY_THREADGROUP(number, name, ...)    \
  using lily_type_##name = __VA_ARGS__;        \
  __shared__ lily_type_##name name;

// Function constants: the host defines LILY_FC_<index> as the value's bits (an unsigned integer) and LILY_FC_<index>_SET.
template <class T> constexpr LILY_INLINE T lily_constant_value(ulong bits) {
  if constexpr (metal::is_same_v<T, bool>) return (bits & 1) != 0;
  else if constexpr (sizeof(T) == 8) return as_type<T>(bits);
  else if constexpr (sizeof(T) == 4) return as_type<T>((uint)bits);
  else if constexpr (sizeof(T) == 2) return as_type<T>((ushort)bits);
  else return as_type<T>((uchar)bits);
}
template <class T, uint n> constexpr T lily_constant();
template <uint n> constexpr bool lily_constant_defined();
#define LILY_FUNCTION_CONSTANT(T, n, defined, bits)                                                          \
  template <> constexpr LILY_INLINE T lily_constant<T, n>() { return lily_constant_value<T>(bits); }         \
  template <> constexpr LILY_INLINE bool lily_constant_defined<n>() { return defined; }
