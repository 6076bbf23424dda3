// Parts of sample_token: integer weights, ordered keys, the counter-based generator, selection by radix.
//
// A token's weight is round(2^26 exp((logit - peak) / temperature)), an integer: sums are exact whatever the order of
// threads, so a seed gives the same token on every device. What rounds to nothing is below 2^-27 of the likeliest token.
#pragma once
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kWeightOne = 1u << 26;
constant constexpr uint kHalfBits = 13;        // weights are summed as two 13-bit halves: 2^18 of them fit 32 bits
constant constexpr uint kHalfMask = (1u << kHalfBits) - 1;
constant constexpr uint kBins = 256;
constant constexpr uint kNone = 0xffffffffu;   // no token

METAL_FUNC ulong joined(uint2 halves) { return (ulong(halves.x) << kHalfBits) + halves.y; }
METAL_FUNC uint2 halves(uint weight) { return uint2(weight >> kHalfBits, weight & kHalfMask); }

// By its bits: no comparison is to be trusted with such a value.
METAL_FUNC bool non_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) == 0x7f800000u; }

// Unsigned order equals the order of floats; both zeros are one key.
METAL_FUNC uint ordered_key(float x) {
  const uint bits = x == 0.0f ? 0u : as_type<uint>(x);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
METAL_FUNC float key_value(uint key) { return as_type<float>(key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu)); }

METAL_FUNC uint token_weight(float logit, float peak, float temperature) {
  if (temperature == 0.0f) return logit == peak ? kWeightOne : 0;
  const float exponent = (logit - peak) / temperature;
  return exponent < -19.0f ? 0 : uint(rint(precise::exp(exponent) * float(kWeightOne)));
}

// Philox4x32-10 (Salmon et al., 2011): two words of the block with this key and counter (counter, 0, 0, 0).
METAL_FUNC uint2 philox(uint2 key, uint counter) {
  uint4 x = uint4(counter, 0, 0, 0);
  for (uint round = 0; round < 10; round++) {
    const uint high0 = mulhi(0xD2511F53u, x.x), low0 = 0xD2511F53u * x.x;
    const uint high1 = mulhi(0xCD9E8D57u, x.z), low1 = 0xCD9E8D57u * x.z;
    x = uint4(high1 ^ x.y ^ key.x, low1, high0 ^ x.w ^ key.y, low0);
    key += uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return x.xy;
}

// floor(value * fraction / 2^32) for value < 2^45, and whether a remainder was cut off.
METAL_FUNC ulong scaled(ulong value, uint fraction, thread bool& rest) {
  const ulong low = (value & 0xffffffffu) * fraction;
  rest = (low & 0xffffffffu) != 0;
  return (value >> 32) * fraction + (low >> 32);
}

// floor(total * (high 2^32 + low) / 2^64): a 64-bit uniform number brought to 0 .. total - 1.
METAL_FUNC ulong uniform_below(ulong total, uint high, uint low) {
  const ulong t_high = total >> 32, t_low = total & 0xffffffffu;
  const ulong middle = t_low * high + ((t_low * low) >> 32);
  const ulong rest = t_high * low + (middle & 0xffffffffu);
  return t_high * high + (middle >> 32) + (rest >> 32);
}

// Tokens with key >= floor whose summed measure, from the largest key down, reaches the target: the selection threshold.
struct Selection {
  uint floor;                  // tokens below are out already
  ulong target;
  bool by_weight;              // measure: weight, or 1 per token
  uint fraction;               // by_weight: target = ceil(sum * fraction / 2^32), found in the first round
};
