// Rotary position embedding by tables: angle p * inv_freq[i] with p = high + low. The two tables hold exact sines of both parts and
// addition of angles joins them, because a GPU's sine is not good at p = 200,000.
#pragma once
#include "common.h"
#include <metal_stdlib>
using namespace metal;

// (cos, sin) of pair `pair` at `position`.
METAL_FUNC float2 rope_turn(device const float2* rope_lo, device const float2* rope_hi, uint position, uint pair, constant AttnPrepareArgs& args) {
  const uint half_rotary = args.rotary_dim / 2;
  const float2 a = rope_lo[position % args.rope_lo_rows * half_rotary + pair], b = rope_hi[position / args.rope_lo_rows * half_rotary + pair];
  return float2(a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y);
}
