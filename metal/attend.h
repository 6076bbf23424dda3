// The inner loop of decode attention: one simdgroup's share of the keys for one query head, or for up to four heads of one
// KV head (D6). Every decode path is built from it, so that paths differ only in how heads and keys are divided: a head's
// numbers are added up in the same order whatever shares its threadgroup, and packing changes no byte of the output.
#pragma once
#include "common.h"
#include "lanes.h"

// D5's control: neighbouring lanes read addresses far apart instead of neighbouring 16 bytes. Off unless the host sets it.
constant bool kStridedSwitch [[function_constant(1)]];

constant constexpr uint kHalfTile = 32;        // keys of a simdgroup whose scores it computes together
constant constexpr uint kMostHalves = 2;

// Keys that a simdgroup takes before it turns to the values: 64 unless the host sets 32 or 16, which spreads the keys over more
// simdgroups, for a GPU that has more of them than keys to give. (policy.py, Tuning.tile_keys)
constant uint kTileKeysSwitch [[function_constant(4)]];
METAL_FUNC uint tile_keys() { return is_function_constant_defined(kTileKeysSwitch) ? kTileKeysSwitch : kMostHalves * kHalfTile; }

constant constexpr uint kQuadKeys = 4;          // keys of a quad in a half tile; 2 in a tile of 16
METAL_FUNC uint quad_keys() { return tile_keys() < kHalfTile ? 2 : kQuadKeys; }
constant constexpr uint kMaxHeadDim = 256;     // a lane sums 8 of the dimensions: 32 lanes cover 256

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

METAL_FUNC void expand_chunk(thread const BfloatChunk& chunk, thread float* value) {
  for (uint i = 0; i < kChunk; i++) value[i] = float(chunk.value[i]);
}

constant constexpr uint kInFlight = 8;         // chunks asked for together: one by one, each would take a trip to memory of its own

// Products of the quad's part of AT_ONCE keys with every head's query; AHEAD chunks of a key at a time.
template <uint HEADS, uint AT_ONCE, uint AHEAD>
METAL_FUNC void multiply_keys(device const bfloat* q, uint last_head, device const bfloat* keys, thread const ulong* rows, uint dim, uint begin,
                              uint hop, uint chunks, thread float* dot) {                    // dot: [HEADS, AT_ONCE, kChunk]
  for (uint chunk = 0; chunk < chunks; chunk += AHEAD) {
    BfloatChunk ahead[AHEAD][AT_ONCE];
    #pragma unroll
    for (uint a = 0; a < AHEAD; a++)
      #pragma unroll
      for (uint j = 0; j < AT_ONCE; j++) ahead[a][j] = *(device const BfloatChunk*)(keys + rows[j] + begin + (chunk + a) * hop);
    #pragma unroll
    for (uint a = 0; a < AHEAD; a++) {
      float key[AT_ONCE][kChunk];
      #pragma unroll
      for (uint j = 0; j < AT_ONCE; j++) expand_chunk(ahead[a][j], key[j]);
      #pragma unroll
      for (uint h = 0; h < HEADS; h++) {
        float query[kChunk];
        load_chunk(q + min(h, last_head) * dim + begin + (chunk + a) * hop, query);
        #pragma unroll
        for (uint j = 0; j < AT_ONCE; j++)
          for (uint c = 0; c < kChunk; c++) dot[(h * AT_ONCE + j) * kChunk + c] = fma(query[c], key[j][c], dot[(h * AT_ONCE + j) * kChunk + c]);
      }
    }
  }
}

// Scores of the quad's keys first .. first + 3. A key is loaded once for all heads; two keys at a time keep four heads' products
// in registers.
template <uint HEADS>
METAL_FUNC void score_keys(device const bfloat* q, uint last_head, device const bfloat* keys, uint stride, uint dim, float scale,
                           uint first, uint end, uint part, thread float4* scores) {
  constexpr uint kAtOnce = HEADS == 1 ? kQuadKeys : 2, kAhead = kInFlight / kAtOnce;
  const bool strided = is_function_constant_defined(kStridedSwitch) && kStridedSwitch;
  const uint begin = strided ? part * (dim / kQuad) : part * kChunk, hop = strided ? kChunk : kQuad * kChunk, chunks = dim / (kQuad * kChunk);
  float score[HEADS][kQuadKeys];
  #pragma unroll
  for (uint base = 0; base < kQuadKeys; base += kAtOnce) {
    if (base >= quad_keys()) {
      for (uint h = 0; h < HEADS; h++)
        for (uint j = 0; j < kAtOnce; j++) score[h][base + j] = 0.0f;
      continue;
    }
    float dot[HEADS * kAtOnce * kChunk] = {0.0f};
    ulong rows[kAtOnce];
    #pragma unroll
    for (uint j = 0; j < kAtOnce; j++) rows[j] = ulong(min(first + base + j, end - 1)) * stride;   // past the end: a real key, masked below
    if (chunks % kAhead == 0) multiply_keys<HEADS, kAtOnce, kAhead>(q, last_head, keys, rows, dim, begin, hop, chunks, dot);
    else multiply_keys<HEADS, kAtOnce, 1>(q, last_head, keys, rows, dim, begin, hop, chunks, dot);
    #pragma unroll
    for (uint h = 0; h < HEADS; h++)
      #pragma unroll
      for (uint j = 0; j < kAtOnce; j++) score[h][base + j] = sum_chunk(dot + (h * kAtOnce + j) * kChunk);
  }
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    const float4 sum = quad_sum(float4(score[h][0], score[h][1], score[h][2], score[h][3])) * scale;
    #pragma unroll
    for (uint j = 0; j < kQuadKeys; j++) scores[h][j] = j < quad_keys() && first + j < end ? sum[j] : kMasked;
  }
}

// sum += weights x values over `count` keys of a tile, this lane's 8 columns. Head dims under 256 leave lanes over: they take
// other keys of the tile ("copies"). A value is loaded once for all heads, kInFlight of them at a time; past the end the last one again,
// with the weight 0 that its masked score got.
template <uint HEADS>
METAL_FUNC void add_values(threadgroup const float* weights, device const bfloat* values, uint stride, uint count, uint copy, uint copies,
                           uint column, uint lane, thread const float* rescale, thread HeadShare* share) {
  const bool strided = is_function_constant_defined(kStridedSwitch) && kStridedSwitch;
  const uint turn = strided ? lane : 0;                   // neighbouring lanes on different rows
  float part[HEADS][kChunk] = {{0.0f}};
  for (uint first = copy; first < count; first += kInFlight * copies) {
    BfloatChunk ahead[kInFlight];
    #pragma unroll
    for (uint k = 0; k < kInFlight; k++)
      ahead[k] = *(device const BfloatChunk*)(values + ulong(min(first + (k + turn) % kInFlight * copies, count - 1)) * stride + column);
    #pragma unroll
    for (uint k = 0; k < kInFlight; k++) {
      const uint key = first + (k + turn) % kInFlight * copies;
      float value[kChunk];
      expand_chunk(ahead[k], value);
      #pragma unroll
      for (uint h = 0; h < HEADS; h++)
        for (uint i = 0; i < kChunk; i++) part[h][i] = fma(weights[key * HEADS + h], value[i], part[h][i]);
    }
  }
  #pragma unroll
  for (uint h = 0; h < HEADS; h++)
    for (uint i = 0; i < kChunk; i++) share[h].sum[i] = fma(share[h].sum[i], rescale[h], part[h][i]);
}

// One simdgroup's share of the keys begin .. end: every simdgroups-th tile, with the running softmax of flash attention.
// D5: the lanes of a quad read neighbouring 16 bytes of a key, all lanes of a value row neighbouring 16 bytes. Heads past
// last_head repeat it. Weights are [key][head]; where two tiles fit they alternate between two buffers, so that one barrier per tile is enough.
template <uint HEADS>
METAL_FUNC void attend(device const bfloat* q, uint last_head, device const bfloat* keys, device const bfloat* values, uint stride, uint dim,
                       float scale, uint begin, uint end, uint simdgroups, uint simdgroup_index, uint lane, threadgroup float* buffers,
                       thread HeadShare* share) {
  const uint quad = lane / kQuad, part = lane % kQuad;
  const uint row_lanes = dim / kChunk, copies = min(32 / row_lanes, tile_keys() / kInFlight), copy = lane / row_lanes, column = lane % row_lanes * kChunk;
  const uint tile_size = tile_keys(), halves = (tile_size + kHalfTile - 1) / kHalfTile;
  uint flip = 0;
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    share[h].softmax.peak = kMasked;
    share[h].softmax.total = 0.0f;
    for (uint i = 0; i < kChunk; i++) share[h].sum[i] = 0.0f;
  }

  for (uint tile = begin + simdgroup_index * tile_size; tile < end; tile += simdgroups * tile_size) {
    threadgroup float* weights = buffers + flip;
    float4 scores[kMostHalves][HEADS];
    #pragma unroll
    for (uint half_tile = 0; half_tile < kMostHalves; half_tile++) {
      for (uint h = 0; h < HEADS; h++) scores[half_tile][h] = float4(kMasked);
      if (half_tile >= halves || tile + half_tile * kHalfTile >= end) break;     // the same for all lanes
      score_keys<HEADS>(q, last_head, keys, stride, dim, scale, tile + half_tile * kHalfTile + quad * quad_keys(), end, part, scores[half_tile]);
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
      float added[kMostHalves] = {0.0f};
      #pragma unroll
      for (uint half_tile = 0; half_tile < kMostHalves; half_tile++) {
        if (half_tile >= halves) break;
        float4 weight;
        #pragma unroll
        for (uint j = 0; j < kQuadKeys; j++) weight[j] = fast::exp(scores[half_tile][h][j] - new_peak);
        added[half_tile] = (weight.x + weight.y) + (weight.z + weight.w);
        if (part == 0)
          #pragma unroll
          for (uint j = 0; j < kQuadKeys; j++)
            if (j < quad_keys()) weights[(half_tile * kHalfTile + quad * quad_keys() + j) * HEADS + h] = weight[j];
      }
      share[h].softmax.total = fma(share[h].softmax.total, rescale[h], added[0] + added[1]);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    add_values<HEADS>(weights, values + ulong(tile) * stride, stride, copy < copies ? min(tile_size, end - tile) : 0, copy, copies, column,
                      lane, rescale, share);
    if (2 * tile_size * HEADS <= kScratch) flip ^= tile_size * HEADS;
    else simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) share[h].softmax.total = simd_sum(part == 0 ? share[h].softmax.total : 0.0f);
}

// Joins the simdgroups' shares of one head: its softmax, and what each share's sums count for in it (0 for a simdgroup without keys).
METAL_FUNC Softmax join_factors(threadgroup const Softmax* shares, uint simdgroups, uint most, thread float* factors) {
  Softmax all{kMasked, 0.0f};
  for (uint s = 0; s < simdgroups; s++) all.peak = max(all.peak, shares[s].peak);
  for (uint s = 0; s < most; s++) {
    factors[s] = s < simdgroups && shares[s].total != 0.0f ? fast::exp(shares[s].peak - all.peak) : 0.0f;
    if (factors[s] != 0.0f) all.total = fma(factors[s], shares[s].total, all.total);
  }
  return all;
}

// One dimension of one share. partial: kScratch floats of a simdgroup, [copies][dim] as the lanes hold it.
METAL_FUNC float join_dim(threadgroup const float* partial, uint dim, uint d) {
  float sum = partial[d];
  if (2 * dim <= kScratch)
    for (uint c = dim + d; c < kScratch / dim * dim; c += dim) sum += partial[c];
  return sum;
}
