#include <metal_stdlib>
using namespace metal;
kernel void k(device int* a [[buffer(0)]]) {
  static int calls = 0;
  a[0] = calls++;
}
