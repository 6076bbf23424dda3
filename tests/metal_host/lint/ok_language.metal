#include <metal_stdlib>
using namespace metal;
constant uint N [[function_constant(0)]];
constant bool FAST [[function_constant(1)]];
constant uint M = is_function_constant_defined(FAST) ? N * 2 : N;
constant constexpr float TABLE[4] = {1.0, 2.0, 3.0, 4.0};
constant constexpr uint WIDTH = 8;
struct Args { uint n; float scale; };
template <typename T> struct Pair { T a, b; METAL_FUNC T sum() const { return a + b; } };
METAL_FUNC float helper(device const float* p, constant Args& args) { return p[0] * args.scale; }
template <typename T, int COUNT>
[[kernel, max_total_threads_per_threadgroup(64)]] void k(
    device const float* in [[buffer(0)]], device T* out [[buffer(1)]], constant Args& args [[buffer(2)]],
    threadgroup float4* scratch [[threadgroup(0)]], uint3 tid [[thread_position_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]]) {
  threadgroup T tile[COUNT][WIDTH];
  threadgroup atomic_uint counter;
  Args copy = args;
  Pair<float> pair = {helper(in, args), copy.scale};
  if (tid.x == 0) atomic_store_explicit(&counter, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&counter, 1u, memory_order_relaxed);
  float4 v = float4(1.0, 2, 3, 4);
  v.xy = v.zw * 2.0h;
  for (uint i = 0; i < M; i++) v += float4(TABLE[i & 3]);
  tile[0][tid.x % WIDTH] = T(v.x + pair.sum());
  threadgroup_barrier(mem_flags::mem_threadgroup);
  thread float x[2] = {v.x, v.y};
  out[tid.x] = T(x[0] + x[1] + scratch[0].x) + tile[0][0];
}
template [[host_name("k_bf16")]] [[kernel]] decltype(k<bfloat, 4>) k<bfloat, 4>;
template [[host_name("k_f32")]] kernel void k<float, 2>(device const float*, device float*, constant Args&, threadgroup float4*, uint3, uint3);
