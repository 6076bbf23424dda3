#include <metal_stdlib>
using namespace metal;
kernel void k(device bfloat* a [[buffer(0)]], device half* h [[buffer(1)]]) {
  a[0] = bfloat(1);
  h[0] = a[0];
}
