#include <metal_stdlib>
using namespace metal;
kernel void k(device float* a [[buffer(0)]]) {
  float x[4];
  float* p = x;
  a[0] = p[0];
}
