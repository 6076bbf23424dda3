// Weight matrices as kernels read them: affine 4/8-bit rows that stay packed until used, and plain bf16 rows.
// Everything works in blocks of 32 weights of one row: one lane's step of a GEMV and one thread's share of a
// GEMM tile. A block is one (4-bit) or two (8-bit) 16-byte loads, always inside one quantisation group.
#pragma once
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kBlock = 32;   // weights per block; every row length is a multiple of it

// A block of bf16 moves as one aligned struct: four wide loads for a GPU, whole vectors for a CPU.
struct alignas(16) BfloatBlock {
  bfloat value[kBlock];
};

METAL_FUNC void store_block(device bfloat* out, thread const BfloatBlock& block) { *(device BfloatBlock*)out = block; }
METAL_FUNC void store_block(threadgroup bfloat* out, thread const BfloatBlock& block) { *(threadgroup BfloatBlock*)out = block; }

// 32 activations held in registers and used for several rows; their sum carries the bias term
// (sum of (scale q + bias) x = scale (sum of q x) + bias (sum of x)).
struct ActivationBlock {
  float value[kBlock];
  float sum;
  float nibble_offset;      // 256 (sum of the even ones) + 16 (sum of the odd ones): see QuantMatrix::multiply
};

// Sums go pairwise over halves: independent chains for a GPU, whole vectors for a CPU.
METAL_FUNC void sum_activations(thread ActivationBlock& block) {
  float half_sum[16];
  for (uint i = 0; i < 16; i++) half_sum[i] = block.value[i] + block.value[i + 16];
  for (uint i = 0; i < 8; i++) half_sum[i] += half_sum[i + 8];
  for (uint i = 0; i < 4; i++) half_sum[i] += half_sum[i + 4];
  block.sum = (half_sum[0] + half_sum[1]) + (half_sum[2] + half_sum[3]);
  block.nibble_offset = fma(256.0f, half_sum[0] + half_sum[2], 16.0f * (half_sum[1] + half_sum[3]));
}

METAL_FUNC ActivationBlock load_activations(device const bfloat* x) {
  ActivationBlock block;
  const BfloatBlock stored = *(device const BfloatBlock*)x;
  for (uint i = 0; i < kBlock; i++) block.value[i] = float(stored.value[i]);
  sum_activations(block);
  return block;
}

// 32 floats in wide loads; x is aligned to 16 bytes.
METAL_FUNC void load_floats(device const float* x, thread float* out) {
  #pragma unroll
  for (uint i = 0; i < kBlock / 4; i++) {
    const float4 part = ((device const float4*)x)[i];
    out[4 * i] = part.x;
    out[4 * i + 1] = part.y;
    out[4 * i + 2] = part.z;
    out[4 * i + 3] = part.w;
  }
}

// Products are summed in kPartials chains, which the end of a row adds up: independent for a GPU, one vector for a CPU.
constant constexpr uint kPartials = 8;

METAL_FUNC void dot_block(thread const float* w, thread const ActivationBlock& x, thread float* part) {
  for (uint i = 0; i < kPartials; i++) part[i] = w[i] * x.value[i];
  for (uint step = kPartials; step < kBlock; step += kPartials)
    for (uint i = 0; i < kPartials; i++) part[i] = fma(w[step + i], x.value[step + i], part[i]);
}

// Pairs at distance 4, 2, 1, written out: a loop over halving widths keeps the values in memory.
METAL_FUNC float sum_partials(thread const float* v) {
  const float4 half_sum = float4(v[0], v[1], v[2], v[3]) + float4(v[4], v[5], v[6], v[7]);
  const float2 quarter_sum = half_sum.xy + half_sum.zw;
  return quarter_sum.x + quarter_sum.y;
}

// A block of packed weights on its way from memory.
template <int BITS>
struct QuantBlock {
  uint4 packed[BITS / 4];
  float scale, bias;
};

// The same as it comes from memory: nothing waits for it before it is multiplied.
template <int BITS>
struct QuantRow {
  uint4 packed[BITS / 4];
  bfloat scale, bias;
};

// Scales and biases (bits) of four neighbouring groups of a row, kept while a tile walks over them: a GPU's cache takes as long for one
// 16-bit value of every row as for eight bytes.
struct QuantScales {
  uint2 scale, bias;
};
// Element `i` of four bf16.
METAL_FUNC float pick_bfloat(uint2 four, uint i) {
  const uint pair = i & 2 ? four.y : four.x;
  return as_type<float>(i & 1 ? pair & 0xffff0000u : pair << 16);
}

// Rows of `blocks` blocks. Packing: value j of a row sits in word j / (32 / BITS), lowest bits first.
template <int BITS, int GROUP>
struct QuantMatrix {
  using Block = QuantBlock<BITS>;
  using Row = QuantRow<BITS>;
  using Scales = QuantScales;
  device const uint4* words;
  device const bfloat* scales;
  device const bfloat* biases;
  uint blocks;                                     // per row

  METAL_FUNC Block load_packed(uint row, uint block) const {
    Block loaded;
    device const uint4* source = words + (row * blocks + block) * (BITS / 4);
    #pragma unroll
    for (uint i = 0; i < BITS / 4; i++) loaded.packed[i] = source[i];
    return loaded;
  }
  METAL_FUNC Block load(uint row, uint block) const {
    Block loaded = load_packed(row, block);
    const uint group = group_of(row, block);
    loaded.scale = float(scales[group]);
    loaded.bias = float(biases[group]);
    return loaded;
  }
  // The same for callers that take every second block of a row in turn and keep `near` between calls.
  METAL_FUNC Block load(uint row, uint block, thread QuantScales& near) const {
    constexpr uint kInGroup = GROUP / kBlock;
    const uint groups = blocks / kInGroup;
    if (groups % 4 != 0) return load(row, block);                  // rows do not start at 8-byte boundaries
    Block loaded = load_packed(row, block);
    const uint in_row = block / kInGroup;
    if (block % (4 * kInGroup) < 2) {
      const uint at = row * (groups / 4) + in_row / 4;
      near.scale = ((device const uint2*)scales)[at];
      near.bias = ((device const uint2*)biases)[at];
    }
    loaded.scale = pick_bfloat(near.scale, in_row % 4);
    loaded.bias = pick_bfloat(near.bias, in_row % 4);
    return loaded;
  }
  METAL_FUNC Row fetch(uint row, uint block) const {
    Row loaded;
    device const uint4* source = words + (row * blocks + block) * (BITS / 4);
    #pragma unroll
    for (uint i = 0; i < BITS / 4; i++) loaded.packed[i] = source[i];
    const uint group = group_of(row, block);
    loaded.scale = scales[group];
    loaded.bias = biases[group];
    return loaded;
  }
  // The block's integers, as floats.
  template <typename Packed>
  static METAL_FUNC void unpack(thread const Packed& block, thread float* q) {
    constexpr uint kPerWord = 32 / BITS, kMask = (1u << BITS) - 1;
    #pragma unroll
    for (uint load = 0; load < BITS / 4; load++) {
      const uint4 packed = block.packed[load];
      const uint word[4] = {packed.x, packed.y, packed.z, packed.w};
      #pragma unroll
      for (uint i = 0; i < 4; i++)
        #pragma unroll
        for (uint j = 0; j < kPerWord; j++) q[(load * 4 + i) * kPerWord + j] = float((word[i] >> (BITS * j)) & kMask);
    }
  }
  METAL_FUNC uint group_of(uint row, uint block) const { return row * (blocks / (GROUP / kBlock)) + block / (GROUP / kBlock); }

  // sum[kPartials] += w . x in partial sums; rest += the bias term.
  METAL_FUNC void accumulate(uint row, uint block, thread const ActivationBlock& x, thread float* sum, thread float& rest) const {
    float q[kBlock];
    const Block packed = load(row, block);
    unpack(packed, q);
    float part[kPartials];
    dot_block(q, x, part);
    for (uint i = 0; i < kPartials; i++) sum[i] = fma(packed.scale, part[i], sum[i]);
    rest = fma(packed.bias, x.sum, rest);
  }
  // total += w . x for a block that has been loaded before. Four bits become a float without a conversion: as mantissa bits below an
  // exponent of 0 they make 1 + q / 16 (odd weights) or 1 + q / 256 (even ones, of the same shifted word), exactly, and what the
  // ones add up to is known beforehand: nibble_offset.
  METAL_FUNC void multiply(thread const Row& packed, thread const ActivationBlock& x, thread float& total) const {
    const float scale = float(packed.scale), bias = float(packed.bias);
    float q[kBlock], part[kPartials];
    if (BITS == 4) {
      // 1.0f, but not to the compiler: masking and setting bits are one instruction if one of the constants is in a register.
      const uint one = 0x3f800000u | uint(blocks == 0);
      const uint word[4] = {packed.packed[0].x, packed.packed[0].y, packed.packed[0].z, packed.packed[0].w};
      #pragma unroll
      for (uint i = 0; i < 4; i++) {
        const uint shifted[4] = {word[i] << 15, word[i] << 7, word[i] >> 1, word[i] >> 9};
        #pragma unroll
        for (uint j = 0; j < 4; j++) {
          q[i * 8 + 2 * j] = as_type<float>((shifted[j] & 0x00078000u) | one);
          q[i * 8 + 2 * j + 1] = as_type<float>((shifted[j] & 0x00780000u) | one);
        }
      }
      dot_block(q, x, part);
      const float even = (part[0] + part[4]) + (part[2] + part[6]), odd = (part[1] + part[5]) + (part[3] + part[7]);
      total = fma(scale, fma(256.0f, even, fma(16.0f, odd, -x.nibble_offset)), fma(bias, x.sum, total));
    } else {
      unpack(packed, q);
      dot_block(q, x, part);
      total = fma(scale, sum_partials(part), fma(bias, x.sum, total));
    }
  }
  // The block's weights as bf16, for a matrix tile (P1) or an embedding row: four 16-byte stores.
  template <typename Pointer>
  METAL_FUNC void expand(Block block, Pointer out) const {
    float q[kBlock];
    unpack(block, q);
    BfloatBlock expanded;
    #pragma unroll
    for (uint i = 0; i < kBlock; i++) expanded.value[i] = bfloat(fma(block.scale, q[i], block.bias));
    store_block(out, expanded);
  }
  template <typename Pointer>
  METAL_FUNC void expand(uint row, uint block, Pointer out) const {
    const Block loaded = load(row, block);
    expand(loaded, out);
  }
};

// The same interface over unquantised bf16 rows.
struct NoScales {};
struct DenseMatrix {
  using Block = BfloatBlock;
  using Row = BfloatBlock;
  using Scales = NoScales;
  device const bfloat* weights;
  uint blocks;

  METAL_FUNC Block load(uint row, uint block) const { return ((device const BfloatBlock*)weights)[row * blocks + block]; }
  METAL_FUNC Block load(uint row, uint block, thread NoScales&) const { return load(row, block); }
  METAL_FUNC Row fetch(uint row, uint block) const { return load(row, block); }

  METAL_FUNC void accumulate(uint row, uint block, thread const ActivationBlock& x, thread float* sum, thread float& rest) const {
    const Block stored = load(row, block);
    float part[kPartials];
    products(stored, x, part);
    for (uint i = 0; i < kPartials; i++) sum[i] += part[i];
  }
  METAL_FUNC void multiply(thread const Block& stored, thread const ActivationBlock& x, thread float& total) const {
    float part[kPartials];
    products(stored, x, part);
    total += sum_partials(part);
  }
  static METAL_FUNC void products(thread const Block& stored, thread const ActivationBlock& x, thread float* part) {
    float w[kBlock];
    for (uint i = 0; i < kBlock; i++) w[i] = float(stored.value[i]);
    dot_block(w, x, part);
  }
  template <typename Pointer>
  METAL_FUNC void expand(Block block, Pointer out) const { store_block(out, block); }
};
