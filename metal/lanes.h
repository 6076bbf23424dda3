// How lanes share rows in the norm, recurrence and attention kernels. A row of bf16 is cut into chunks of 8
// (16 bytes, the widest load); a quad of 4 neighbouring lanes takes the chunks of one row in turn, so a
// simdgroup works on 8 rows at once. One row per quad instead of one per simdgroup needs a sum over 4 lanes, not 32:
// two shuffles on a GPU, and an eighth of the exchanges on a CPU, where an exchange costs as much as the row.
// Row strides and offsets must be multiples of 8 elements.
#pragma once
#include <metal_stdlib>
using namespace metal;

constant constexpr uint kChunk = 8;        // bf16 values per 16-byte load
constant constexpr uint kQuad = 4;         // lanes of a quad
constant constexpr uint kQuads = 8;        // quads of a simdgroup

// Chunks move as aligned structs: one or two wide loads for a GPU, and loops that a CPU compiler turns into whole vectors.
struct alignas(16) BfloatChunk {
  bfloat value[kChunk];
};
struct alignas(16) FloatChunk {
  float value[kChunk];
};

METAL_FUNC void load_chunk(device const bfloat* source, thread float* value) {
  const BfloatChunk chunk = *(device const BfloatChunk*)source;
  for (uint i = 0; i < kChunk; i++) value[i] = float(chunk.value[i]);
}

METAL_FUNC void load_chunk(device const float* source, thread float* value) {
  const FloatChunk chunk = *(device const FloatChunk*)source;
  for (uint i = 0; i < kChunk; i++) value[i] = chunk.value[i];
}

METAL_FUNC void store_chunk(device bfloat* target, thread const float* value) {
  BfloatChunk chunk;
  for (uint i = 0; i < kChunk; i++) chunk.value[i] = bfloat(value[i]);
  *(device BfloatChunk*)target = chunk;
}

METAL_FUNC void store_chunk(device float* target, thread const float* value) {
  FloatChunk chunk;
  for (uint i = 0; i < kChunk; i++) chunk.value[i] = value[i];
  *(device FloatChunk*)target = chunk;
}

// A chunk's eight partial sums, pairwise.
METAL_FUNC float sum_chunk(thread const float* value) {
  return ((value[0] + value[4]) + (value[2] + value[6])) + ((value[1] + value[5]) + (value[3] + value[7]));
}

// Scores that must not count. Finite, because fast::exp may assume that nothing is infinite; exp of it minus any score is 0.
constant constexpr float kMasked = -0.5f * FLT_MAX;

// The hardware's exp and division are exact to a few units of float, far below the bf16 around them; exp must stay finite for them.
METAL_FUNC float sigmoid_of(float numerator, float x) { return fast::divide(numerator, 1.0f + fast::exp(min(-x, 80.0f))); }
METAL_FUNC float silu(float x) { return sigmoid_of(x, x); }
METAL_FUNC float sigmoid(float x) { return sigmoid_of(1.0f, x); }
