#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float t = 1.0f;
  a[i] = t;
}
