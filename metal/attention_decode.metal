// Attention of one query row over the KV cache. Keys 0 .. step.position are read, never more.
// Every kernel shares one inner loop, so the general and the fixed-block path differ only in how keys are divided.
#include "common.h"
#include "lanes.h"

constant constexpr uint kTileKeys = 64;        // keys of one simdgroup at a time: each quad takes 4 of either half
constant constexpr uint kHalfTile = 32;
constant constexpr uint kMaxHeadDim = 256;     // a lane sums 8 of the dimensions: 32 lanes cover 256
constant constexpr uint kMaxSimdgroups = 16;   // 16 KiB of partial outputs
constant constexpr uint kMaxBlocks = 256;      // of the fixed-block path (host: policy)

// What softmax(q K) V needs besides the weighted sum of values: the largest score and the sum of exp(score - peak).
struct Softmax {
  float peak, total;
};

// One simdgroup's share of the keys begin .. end: every simdgroups-th tile of 64, with the running softmax of flash
// attention. D5: the lanes of a quad read neighbouring 16 bytes of a key, all lanes of a value row neighbouring 16 bytes.
// Head dims under 256 leave lanes over for values: they take other keys of the tile ("copies"). Weights alternate between
// two buffers, so that one barrier per tile is enough.
METAL_FUNC Softmax attend(
    device const bfloat* q, device const bfloat* keys, device const bfloat* values, uint stride, uint dim, float scale,
    uint begin, uint end, uint simdgroups, uint simdgroup_index, uint lane, threadgroup float* buffers, thread float* sum) {
  const uint quad = lane / kQuad, part = lane % kQuad;
  const uint row_lanes = dim / kChunk, copies = 32 / row_lanes, copy = lane / row_lanes, column = lane % row_lanes * kChunk;
  float peak = kMasked, total = 0.0f;
  uint flip = 0;
  for (uint i = 0; i < kChunk; i++) sum[i] = 0.0f;

  for (uint tile = begin + simdgroup_index * kTileKeys; tile < end; tile += simdgroups * kTileKeys) {
    threadgroup float* weights = buffers + flip;
    float4 scores[2];
    #pragma unroll
    for (uint half_tile = 0; half_tile < 2; half_tile++) {
      const uint first = tile + half_tile * kHalfTile + quad * 4;
      scores[half_tile] = float4(kMasked);
      if (tile + half_tile * kHalfTile >= end) break;     // the same for all lanes
      float dot[4][kChunk] = {{0.0f}};
      for (uint d = part * kChunk; d < dim; d += kQuad * kChunk) {
        float query[kChunk];
        load_chunk(q + d, query);
        #pragma unroll
        for (uint j = 0; j < 4; j++) {
          float key[kChunk];
          load_chunk(keys + ulong(min(first + j, end - 1)) * stride + d, key);   // past the end: a real key, masked below
          for (uint i = 0; i < kChunk; i++) dot[j][i] = fma(query[i], key[i], dot[j][i]);
        }
      }
      const float4 score = quad_sum(float4(sum_chunk(dot[0]), sum_chunk(dot[1]), sum_chunk(dot[2]), sum_chunk(dot[3]))) * scale;
      #pragma unroll
      for (uint j = 0; j < 4; j++) scores[half_tile][j] = first + j < end ? score[j] : kMasked;
    }
    const float4 larger = max(scores[0], scores[1]);
    const float new_peak = max(peak, simd_max(max(max(larger.x, larger.y), max(larger.z, larger.w))));
    const float rescale = fast::exp(peak - new_peak);     // new_peak is finite: the tile's first key is real
    peak = new_peak;
    total *= rescale;
    #pragma unroll
    for (uint half_tile = 0; half_tile < 2; half_tile++) {
      float4 weight;
      #pragma unroll
      for (uint j = 0; j < 4; j++) weight[j] = fast::exp(scores[half_tile][j] - new_peak);
      total += (weight.x + weight.y) + (weight.z + weight.w);
      if (part == 0)
        #pragma unroll
        for (uint j = 0; j < 4; j++) weights[half_tile * kHalfTile + quad * 4 + j] = weight[j];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // Four keys at a time into sums of their own: one chain of additions would wait for itself.
    float part_sum[4][kChunk] = {{0.0f}};
    const uint count = copy < copies ? min(kTileKeys, end - tile) : 0;
    uint j = copy;
    for (; j + 3 * copies < count; j += 4 * copies)
      #pragma unroll
      for (uint k = 0; k < 4; k++) {
        float value[kChunk];
        load_chunk(values + ulong(tile + j + k * copies) * stride + column, value);
        for (uint i = 0; i < kChunk; i++) part_sum[k][i] = fma(weights[j + k * copies], value[i], part_sum[k][i]);
      }
    for (; j < count; j += copies) {
      float value[kChunk];
      load_chunk(values + ulong(tile + j) * stride + column, value);
      for (uint i = 0; i < kChunk; i++) part_sum[0][i] = fma(weights[j], value[i], part_sum[0][i]);
    }
    for (uint i = 0; i < kChunk; i++)
      sum[i] = fma(sum[i], rescale, (part_sum[0][i] + part_sum[1][i]) + (part_sum[2][i] + part_sum[3][i]));
    flip ^= kTileKeys;
  }
  Softmax result;
  result.peak = peak;
  result.total = simd_sum(part == 0 ? total : 0.0f);
  return result;
}

// Joins the simdgroups' shares. partial: [simdgroups][copies][dim] as lanes hold it; one thread per dimension.
// Returns the joint softmax; `output` receives unnormalised sums.
struct Joined {
  Softmax softmax;
  float sum;
};

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
    for (uint c = 0; c < copies; c++) sum += partial[s * kMaxHeadDim + c * dim + d];
    joined.sum = fma(factor, sum, joined.sum);
    joined.softmax.total = fma(factor, shares[s].total, joined.softmax.total);
  }
  return joined;
}

METAL_FUNC void publish(
    threadgroup float* partial, threadgroup Softmax* shares, Softmax share, thread const float* sum, uint simdgroup_index, uint lane) {
  for (uint i = 0; i < kChunk; i++) partial[simdgroup_index * kMaxHeadDim + lane * kChunk + i] = sum[i];
  if (lane == 0) {
    shares[simdgroup_index].peak = share.peak;
    shares[simdgroup_index].total = share.total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Decode, general path: one threadgroup per query head, its simdgroups divide the keys (D7's control).
[[kernel, max_total_threads_per_threadgroup(512)]] void attn_decode(
    device const bfloat* q [[buffer(0)]],        // [q_heads * head_dim]
    device const bfloat* k_cache [[buffer(1)]],  // [capacity, kv_heads * head_dim]
    device const bfloat* v_cache [[buffer(2)]],
    device bfloat* out [[buffer(3)]],            // [q_heads * head_dim]
    device const StepState& step [[buffer(4)]],
    constant AttnArgs& args [[buffer(5)]],
    uint head [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float weights[kMaxSimdgroups][2 * kTileKeys];
  threadgroup float partial[kMaxSimdgroups * kMaxHeadDim];
  threadgroup Softmax shares[kMaxSimdgroups];
  const uint dim = args.head_dim, kv = head / (args.q_heads / args.kv_heads) * dim;
  float sum[kChunk];
  const Softmax share = attend(q + head * dim, k_cache + kv, v_cache + kv, args.kv_heads * dim, dim, args.scale, 0,
      step.position + 1, simdgroups, simdgroup_index, lane, weights[simdgroup_index], sum);
  publish(partial, shares, share, sum, simdgroup_index, lane);
  for (uint d = thread_index; d < dim; d += threads) {
    const Joined joined = join(partial, shares, simdgroups, dim, d);
    out[head * dim + d] = bfloat(joined.sum / joined.softmax.total);
  }
}

// Decode, fixed-block path for long contexts (D7): a fixed number of blocks per head, equal in keys; how many keys comes
// from the KV length on the GPU, so the recorded program serves a whole range of contexts.
[[kernel, max_total_threads_per_threadgroup(512)]] void attn_decode_split(
    device const bfloat* q [[buffer(0)]],
    device const bfloat* k_cache [[buffer(1)]],
    device const bfloat* v_cache [[buffer(2)]],
    device float* blocks_out [[buffer(3)]],      // [q_heads, blocks, head_dim + 2]: unnormalised sum, peak, total
    device const StepState& step [[buffer(4)]],
    constant AttnArgs& args [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float weights[kMaxSimdgroups][2 * kTileKeys];
  threadgroup float partial[kMaxSimdgroups * kMaxHeadDim];
  threadgroup Softmax shares[kMaxSimdgroups];
  const uint head = group.x, block = group.y, dim = args.head_dim, kv = head / (args.q_heads / args.kv_heads) * dim;
  const uint count = step.position + 1, tiles = (count + kTileKeys - 1) / kTileKeys;
  const uint block_keys = (tiles + args.blocks - 1) / args.blocks * kTileKeys;
  const uint begin = min(block * block_keys, count), end = min(begin + block_keys, count);
  float sum[kChunk];
  const Softmax share = attend(q + head * dim, k_cache + kv, v_cache + kv, args.kv_heads * dim, dim, args.scale, begin, end,
      simdgroups, simdgroup_index, lane, weights[simdgroup_index], sum);
  publish(partial, shares, share, sum, simdgroup_index, lane);
  device float* target = blocks_out + (head * args.blocks + block) * (dim + 2);
  for (uint d = thread_index; d < dim; d += threads.x) {
    const Joined joined = join(partial, shares, simdgroups, dim, d);
    target[d] = joined.sum;
    if (d == 0) {
      target[dim] = joined.softmax.peak;
      target[dim + 1] = joined.softmax.total;
    }
  }
}

// Follows attn_decode_split: one threadgroup per query head joins its blocks; empty blocks have total 0.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_decode_combine(
    device const float* blocks_in [[buffer(0)]], // [q_heads, blocks, head_dim + 2]
    device bfloat* out [[buffer(1)]],            // [q_heads * head_dim]
    device const StepState& step [[buffer(2)]],
    constant AttnArgs& args [[buffer(3)]],
    uint head [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  threadgroup float factors[kMaxBlocks];
  const uint dim = args.head_dim, stride = dim + 2;
  blocks_in += head * args.blocks * stride;
  float peak = kMasked, total = 0.0f;
  for (uint b = 0; b < args.blocks; b++) peak = max(peak, blocks_in[b * stride + dim]);
  for (uint b = thread_index; b < args.blocks; b += threads) {
    const bool used = blocks_in[b * stride + dim + 1] != 0.0f;
    factors[b] = used ? precise::exp(blocks_in[b * stride + dim] - peak) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint b = 0; b < args.blocks; b++) total = fma(factors[b], blocks_in[b * stride + dim + 1], total);
  for (uint d = thread_index; d < dim; d += threads) {
    float sum = 0.0f;
    for (uint b = 0; b < args.blocks; b++) sum = fma(factors[b], blocks_in[b * stride + d], sum);
    out[head * dim + d] = bfloat(sum / total);
  }
}
