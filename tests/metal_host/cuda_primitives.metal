// Kernels of test_cuda_primitives.py: primitives of the standard library, one result per thread.
#include <metal_stdlib>
using namespace metal;

constant uint kScale [[function_constant(0)]];

struct PrimitiveArgs { uint n; float factor; };

[[kernel]] void simd_operations(device const float* x [[buffer(0)]], device const uint* u [[buffer(1)]], device float* f [[buffer(2)]], device uint* out [[buffer(3)]],
                                uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]], uint count [[threads_per_grid]]) {
  const float value = x[i];
  f[i] = simd_sum(value);
  f[count + i] = simd_max(value);
  f[2 * count + i] = quad_sum(float2(value, 1.0f)).x;
  out[i] = simd_min(u[i]);
  out[count + i] = simd_prefix_exclusive_sum(u[i] & 0xffffu);
  out[2 * count + i] = simd_sum(u[i] & 0xffffu);
}

[[kernel]] void simd_moves(device const uint* u [[buffer(0)]], device uint* out [[buffer(1)]], uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  const uint count = 32;
  out[i] = simd_shuffle_xor(u[i], 5);
  out[count + i] = simd_shuffle(u[i], ushort(31 - lane));
  out[2 * count + i] = simd_shuffle_up(u[i], 3);
  out[3 * count + i] = simd_shuffle_down(u[i], 3);
  out[4 * count + i] = simd_shuffle_rotate_up(u[i], 3);
  out[5 * count + i] = uint(ulong(simd_vote::vote_t(simd_ballot(u[i] & 1))));
  out[6 * count + i] = simd_broadcast(ushort4(ushort(u[i])), 7).w;
}

template <typename A, typename B>
METAL_FUNC void multiply(device const A* a, device const B* b, device float* d, bool turn_a, bool turn_b) {
  simdgroup_matrix<A, 8, 8> left;
  simdgroup_matrix<B, 8, 8> right;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
  simdgroup_load(left, a, 8, ulong2(0), turn_a);
  simdgroup_load(right, b, 8, ulong2(0), turn_b);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_store(sum, d, 8);
  simdgroup_store(sum, d + 64, 8, ulong2(0), true);
}
#define MATRIX(name, A, B)                                                                                                                       \
  [[kernel]] void name(device const A* a [[buffer(0)]], device const B* b [[buffer(1)]], device float* d [[buffer(2)]]) {                         \
    multiply(a, b, d, false, false);                                                                                                             \
    multiply(a, b, d + 128, false, true);                                                                                                        \
    multiply(a, b, d + 256, true, false);                                                                                                        \
    multiply(a, b, d + 384, true, true);                                                                                                         \
  }
MATRIX(matrix_bf_bf, bfloat, bfloat)
MATRIX(matrix_f_bf, float, bfloat)
MATRIX(matrix_bf_f, bfloat, float)
MATRIX(matrix_f_f, float, float)
MATRIX(matrix_h_h, half, half)

[[kernel]] void conversions(device const float* x [[buffer(0)]], device bfloat* b [[buffer(1)]], device half* h [[buffer(2)]], device float* e [[buffer(3)]],
                            constant PrimitiveArgs& args [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  if (i >= args.n) return;
  b[i] = bfloat(x[i]);
  h[i] = half(x[i]);
  e[i] = precise::exp(x[i]) * (is_function_constant_defined(kScale) ? float(kScale) : args.factor);
}

[[kernel]] void integers(device const uint* u [[buffer(0)]], device uint* out [[buffer(1)]], uint i [[thread_position_in_grid]], uint count [[threads_per_grid]]) {
  out[i] = popcount(u[i]);
  out[count + i] = clz(u[i]);
  out[2 * count + i] = mulhi(u[i], 0xD2511F53u);
  out[3 * count + i] = reverse_bits(u[i]);
  out[4 * count + i] = extract_bits(u[i], 5, 7);
  out[5 * count + i] = rotate(u[i], 9u);
}

[[kernel]] void atomics(device const uint* u [[buffer(0)]], device atomic_uint* out [[buffer(1)]], device atomic_float* total [[buffer(2)]],
                        uint i [[thread_position_in_grid]], uint slot [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint bins[16];
  if (slot < 16) atomic_store_explicit(&bins[slot], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&bins[u[i] & 15], 1u, memory_order_relaxed);
  atomic_fetch_add_explicit(total, 1.0f, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (slot < 16) atomic_fetch_add_explicit(&out[slot], atomic_load_explicit(&bins[slot], memory_order_relaxed), memory_order_relaxed);
  atomic_fetch_max_explicit(&out[16], u[i], memory_order_relaxed);
}

[[kernel]] void ragged_places(device uint* out [[buffer(0)]], uint2 place [[thread_position_in_grid]], uint2 size [[threads_per_threadgroup]],
                              uint index [[thread_index_in_threadgroup]], uint2 grid [[threads_per_grid]]) {
  threadgroup uint seen;
  if (index == 0) seen = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup atomic_uint* count = (threadgroup atomic_uint*)&seen;
  atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[place.y * grid.x + place.x] = seen | size.x << 8 | size.y << 16 | simd_sum(1u) << 24;
}
