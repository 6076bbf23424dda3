// The inner loop of decode attention: one simdgroup's share of the keys for one query head, or for up to four heads of one
// KV head (D6). Every decode path is built from it, so that paths differ only in how heads and keys are divided: a head's
// numbers are added up in the same order whatever shares its threadgroup, and packing changes no byte of the output.
#pragma once
#include "common.h"
#include "lanes.h"

// D5's control: neighbouring lanes read addresses far apart instead of neighbouring 16 bytes. Off unless the host sets it.
constant bool kStridedSwitch [[function_constant(1)]];

constant constexpr uint kTileKeys = 64;        // keys of one simdgroup at a time: each quad takes 4 of either half
constant constexpr uint kHalfTile = 32;
constant constexpr uint kQuadKeys = 4;
constant constexpr uint kMaxHeadDim = 256;     // a lane sums 8 of the dimensions: 32 lanes cover 256
constant constexpr uint kChains = 2;           // sums of values in flight per head: one chain would wait for itself

// What softmax(q K) V needs besides the weighted sum of values: the largest score and the sum of exp(score - peak).
struct Softmax {
  float peak, total;
};

// One head's part of a simdgroup's result: the lane holds 8 of the dimensions, unnormalised.
struct HeadShare {
  Softmax softmax;
  float sum[kChunk];
};

// Threadgroup floats of a simdgroup: weights while it attends (two buffers of one head, or one of four), then the sums it publishes.
constant constexpr uint kScratch = kMaxHeadDim;

// The largest of each head's values over the simdgroup; four heads in one exchange.
template <uint HEADS>
METAL_FUNC void largest(thread float* value) {
  if (HEADS == 4) {
    const float4 all = simd_max(float4(value[0], value[1 % HEADS], value[2 % HEADS], value[3 % HEADS]));
    for (uint h = 0; h < HEADS; h++) value[h] = all[h];
  } else {
    for (uint h = 0; h < HEADS; h++) value[h] = simd_max(value[h]);
  }
}

// Scores of the quad's keys first .. first + 3. A key is loaded once for all heads; two keys at a time keep four heads' products
// in registers.
template <uint HEADS>
METAL_FUNC void score_keys(device const bfloat* q, uint last_head, device const bfloat* keys, uint stride, uint dim, float scale,
                           uint first, uint end, uint part, thread float4* scores) {
  constexpr uint kAtOnce = HEADS == 1 ? kQuadKeys : 2;
  const bool strided = is_function_constant_defined(kStridedSwitch) && kStridedSwitch;
  const uint begin = strided ? part * (dim / kQuad) : part * kChunk, hop = strided ? kChunk : kQuad * kChunk;
  float score[HEADS][kQuadKeys];
  #pragma unroll
  for (uint base = 0; base < kQuadKeys; base += kAtOnce) {
    float dot[HEADS][kAtOnce][kChunk] = {{{0.0f}}};
    for (uint i = 0, d = begin; i < dim / (kQuad * kChunk); i++, d += hop) {
      float key[kAtOnce][kChunk];
      #pragma unroll
      for (uint j = 0; j < kAtOnce; j++)                  // past the end: a real key, masked below
        load_chunk(keys + ulong(min(first + base + j, end - 1)) * stride + d, key[j]);
      #pragma unroll
      for (uint h = 0; h < HEADS; h++) {
        float query[kChunk];
        load_chunk(q + min(h, last_head) * dim + d, query);
        #pragma unroll
        for (uint j = 0; j < kAtOnce; j++)
          for (uint c = 0; c < kChunk; c++) dot[h][j][c] = fma(query[c], key[j][c], dot[h][j][c]);
      }
    }
    #pragma unroll
    for (uint h = 0; h < HEADS; h++)
      #pragma unroll
      for (uint j = 0; j < kAtOnce; j++) score[h][base + j] = sum_chunk(dot[h][j]);
  }
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    const float4 sum = quad_sum(float4(score[h][0], score[h][1], score[h][2], score[h][3])) * scale;
    #pragma unroll
    for (uint j = 0; j < kQuadKeys; j++) scores[h][j] = first + j < end ? sum[j] : kMasked;
  }
}

// sum += weights x values over `count` keys of a tile, this lane's 8 columns. Head dims under 256 leave lanes over: they take
// other keys of the tile ("copies"). A value is loaded once for all heads.
template <uint HEADS>
METAL_FUNC void add_values(threadgroup const float* weights, device const bfloat* values, uint stride, uint count, uint copy, uint copies,
                           uint column, uint lane, thread const float* rescale, thread HeadShare* share) {
  const bool strided = is_function_constant_defined(kStridedSwitch) && kStridedSwitch;
  const uint turn = strided ? lane : 0;                   // neighbouring lanes on different rows
  float part[HEADS][kChains][kChunk] = {{{0.0f}}};
  uint j = copy;
  for (; j + 3 * copies < count; j += 4 * copies)
    #pragma unroll
    for (uint k = 0; k < 4; k++) {
      const uint key = j + (k + turn) % 4 * copies;
      float value[kChunk];
      load_chunk(values + ulong(key) * stride + column, value);
      #pragma unroll
      for (uint h = 0; h < HEADS; h++)
        for (uint i = 0; i < kChunk; i++) part[h][k % kChains][i] = fma(weights[key * HEADS + h], value[i], part[h][k % kChains][i]);
    }
  for (; j < count; j += copies) {
    float value[kChunk];
    load_chunk(values + ulong(j) * stride + column, value);
    #pragma unroll
    for (uint h = 0; h < HEADS; h++)
      for (uint i = 0; i < kChunk; i++) part[h][0][i] = fma(weights[j * HEADS + h], value[i], part[h][0][i]);
  }
  #pragma unroll
  for (uint h = 0; h < HEADS; h++)
    for (uint i = 0; i < kChunk; i++) share[h].sum[i] = fma(share[h].sum[i], rescale[h], part[h][0][i] + part[h][1][i]);
}

// One simdgroup's share of the keys begin .. end: every simdgroups-th tile of 64, with the running softmax of flash attention.
// D5: the lanes of a quad read neighbouring 16 bytes of a key, all lanes of a value row neighbouring 16 bytes. Heads past
// last_head repeat it. Weights are [key][head]; one head's alternate between two buffers, so that one barrier per tile is enough.
template <uint HEADS>
METAL_FUNC void attend(device const bfloat* q, uint last_head, device const bfloat* keys, device const bfloat* values, uint stride, uint dim,
                       float scale, uint begin, uint end, uint simdgroups, uint simdgroup_index, uint lane, threadgroup float* buffers,
                       thread HeadShare* share) {
  const uint quad = lane / kQuad, part = lane % kQuad;
  const uint row_lanes = dim / kChunk, copies = 32 / row_lanes, copy = lane / row_lanes, column = lane % row_lanes * kChunk;
  uint flip = 0;
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    share[h].softmax.peak = kMasked;
    share[h].softmax.total = 0.0f;
    for (uint i = 0; i < kChunk; i++) share[h].sum[i] = 0.0f;
  }

  for (uint tile = begin + simdgroup_index * kTileKeys; tile < end; tile += simdgroups * kTileKeys) {
    threadgroup float* weights = buffers + flip;
    float4 scores[2][HEADS];
    #pragma unroll
    for (uint half_tile = 0; half_tile < 2; half_tile++) {
      for (uint h = 0; h < HEADS; h++) scores[half_tile][h] = float4(kMasked);
      if (tile + half_tile * kHalfTile >= end) break;     // the same for all lanes
      score_keys<HEADS>(q, last_head, keys, stride, dim, scale, tile + half_tile * kHalfTile + quad * kQuadKeys, end, part, scores[half_tile]);
    }
    float peak[HEADS], rescale[HEADS];
    #pragma unroll
    for (uint h = 0; h < HEADS; h++) {
      const float4 larger = max(scores[0][h], scores[1][h]);
      peak[h] = max(max(larger.x, larger.y), max(larger.z, larger.w));
    }
    largest<HEADS>(peak);
    #pragma unroll
    for (uint h = 0; h < HEADS; h++) {
      const float new_peak = max(share[h].softmax.peak, peak[h]);          // finite: the tile's first key is real
      rescale[h] = fast::exp(share[h].softmax.peak - new_peak);
      share[h].softmax.peak = new_peak;
      float added[2];
      #pragma unroll
      for (uint half_tile = 0; half_tile < 2; half_tile++) {
        float4 weight;
        #pragma unroll
        for (uint j = 0; j < kQuadKeys; j++) weight[j] = fast::exp(scores[half_tile][h][j] - new_peak);
        added[half_tile] = (weight.x + weight.y) + (weight.z + weight.w);
        if (part == 0)
          #pragma unroll
          for (uint j = 0; j < kQuadKeys; j++) weights[(half_tile * kHalfTile + quad * kQuadKeys + j) * HEADS + h] = weight[j];
      }
      share[h].softmax.total = fma(share[h].softmax.total, rescale[h], added[0] + added[1]);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    add_values<HEADS>(weights, values + ulong(tile) * stride, stride, copy < copies ? min(kTileKeys, end - tile) : 0, copy, copies, column,
                      lane, rescale, share);
    if (2 * kTileKeys * HEADS <= kScratch) flip ^= kTileKeys * HEADS;
    else simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) share[h].softmax.total = simd_sum(part == 0 ? share[h].softmax.total : 0.0f);
}

// A head's softmax and one of its dimensions, over all simdgroups.
struct Joined {
  Softmax softmax;
  float sum;
};

// Joins the simdgroups' shares of one head. partial: kScratch floats per simdgroup, [copies][dim] as the lanes hold it.
METAL_FUNC Joined join(threadgroup const float* partial, threadgroup const Softmax* shares, uint simdgroups, uint dim, uint d) {
  Joined joined;
  joined.softmax.peak = kMasked;
  joined.softmax.total = joined.sum = 0.0f;
  for (uint s = 0; s < simdgroups; s++) joined.softmax.peak = max(joined.softmax.peak, shares[s].peak);
  const uint copies = 32 / (dim / kChunk);
  for (uint s = 0; s < simdgroups; s++) {
    if (shares[s].total == 0.0f) continue;                // a simdgroup without keys
    const float factor = precise::exp(shares[s].peak - joined.softmax.peak);
    float sum = 0.0f;
    for (uint c = 0; c < copies; c++) sum += partial[s * kScratch + c * dim + d];
    joined.sum = fma(factor, sum, joined.sum);
    joined.softmax.total = fma(factor, shares[s].total, joined.softmax.total);
  }
  return joined;
}
