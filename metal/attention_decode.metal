// Attention of one query row over the KV cache. Keys 0 .. step.position are read, never more.
// A kernel's name spells its path. packed (D6): a threadgroup serves several query heads of one KV head and loads each KV row once;
// grid.x = q_heads / pack, pack <= 4 divides q_heads / kv_heads. split (D7): blocks of keys in parallel, joined by a combine. gate:
// o *= sigmoid(gate) in the epilogue instead of a launch of output_gate. Thread and block counts decide how keys are divided, so packed
// and unpacked agree byte for byte at equal counts. Function constant 1 (bool): the control of D5, in every kernel that reads keys.
#include "attend.h"

constant constexpr uint kMaxSimdgroups = 16;   // 16 KiB of scratch
constant constexpr uint kSplitThreads = 128;   // leaves four heads' sums their registers, and threadgroup memory for all of them at once
constant constexpr uint kPack = 4;
constant constexpr uint kMaxBlocks = 256;      // of the fixed-block path (host: policy)

// A threadgroup's query heads and their column in a cache row.
struct Heads {
  uint first, pack, column;
};

METAL_FUNC Heads heads_of(constant AttnArgs& args, uint group, uint groups) {
  Heads heads;
  heads.pack = args.q_heads / groups;
  heads.first = group * heads.pack;
  heads.column = heads.first / (args.q_heads / args.kv_heads) * args.head_dim;
  return heads;
}

// A head's shares into threadgroup memory, where join finds them.
METAL_FUNC void publish(threadgroup float* scratch, threadgroup Softmax* shares, thread const HeadShare& share, uint simdgroup_index, uint lane) {
  for (uint i = 0; i < kChunk; i++) scratch[simdgroup_index * kScratch + lane * kChunk + i] = share.sum[i];
  if (lane == 0) shares[simdgroup_index] = share.softmax;
}

// The output's gate: q_proj left it behind the head's query.
METAL_FUNC float gate(device const bfloat* proj, uint head, uint dim, uint d) {
  return sigmoid(float(proj[(2 * head + 1) * dim + d]));
}

template <uint HEADS, bool GATE>
METAL_FUNC void decode(device const bfloat* q, device const bfloat* k_cache, device const bfloat* v_cache, device bfloat* out,
                       uint keys, constant AttnArgs& args, device const bfloat* proj, threadgroup float* scratch, threadgroup Softmax* shares,
                       thread const Heads& heads, uint thread_index, uint threads, uint simdgroups, uint simdgroup_index, uint lane) {
  const uint dim = args.head_dim;
  HeadShare share[HEADS];
  attend<HEADS>(q + heads.first * dim, heads.pack - 1, k_cache + heads.column, v_cache + heads.column, args.kv_heads * dim, dim, args.scale, 0,
                keys, simdgroups, simdgroup_index, lane, scratch + simdgroup_index * kScratch, share);
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    if (h >= heads.pack) break;                           // the same for all threads
    threadgroup_barrier(mem_flags::mem_threadgroup);      // weights, or the head before, have been read
    publish(scratch, shares, share[h], simdgroup_index, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint head = heads.first + h;
    float factors[kMaxSimdgroups];
    const Softmax softmax = join_factors(shares, simdgroups, kMaxSimdgroups, factors);
    for (uint d = thread_index; d < dim; d += threads) {
      float sum = 0.0f;
      for (uint s = 0; s < simdgroups; s++) sum = fma(factors[s], join_dim(scratch + s * kScratch, dim, d), sum);
      const float value = sum / softmax.total;
      out[head * dim + d] = bfloat(GATE ? value * gate(proj, head, dim, d) : value);
    }
  }
}

// Decode, general path (D7's control): the simdgroups of one threadgroup divide all keys.
template <uint HEADS>
[[kernel, max_total_threads_per_threadgroup(512)]] void attn_decode(
    device const bfloat* q [[buffer(0)]],        // [q_heads * head_dim]
    device const bfloat* k_cache [[buffer(1)]],  // [capacity, kv_heads * head_dim]
    device const bfloat* v_cache [[buffer(2)]],
    device bfloat* out [[buffer(3)]],            // [q_heads * head_dim]
    device const StepState& step [[buffer(4)]],
    constant AttnArgs& args [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scratch[kMaxSimdgroups * kScratch];
  threadgroup Softmax shares[kMaxSimdgroups];
  const Heads heads = heads_of(args, group, groups);
  decode<HEADS, false>(q, k_cache, v_cache, out, step.position + 1, args, q, scratch, shares, heads, thread_index,
                       threads, simdgroups, simdgroup_index, lane);
}

// The same with the output gate.
template <uint HEADS>
[[kernel, max_total_threads_per_threadgroup(512)]] void attn_decode_gate(
    device const bfloat* q [[buffer(0)]],
    device const bfloat* k_cache [[buffer(1)]],
    device const bfloat* v_cache [[buffer(2)]],
    device bfloat* out [[buffer(3)]],
    device const StepState& step [[buffer(4)]],
    constant AttnArgs& args [[buffer(5)]],
    device const bfloat* proj [[buffer(6)]],     // per head: query head_dim, then gate head_dim
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scratch[kMaxSimdgroups * kScratch];
  threadgroup Softmax shares[kMaxSimdgroups];
  const Heads heads = heads_of(args, group, groups);
  decode<HEADS, true>(q, k_cache, v_cache, out, step.position + 1, args, proj, scratch, shares, heads, thread_index,
                      threads, simdgroups, simdgroup_index, lane);
}

// Decode, fixed-block path for long contexts (D7): a fixed number of blocks per head, equal in keys; how many keys comes
// from the KV length on the GPU, so the recorded program serves a whole range of contexts. grid = (heads as above, blocks).
template <uint HEADS>
[[kernel, max_total_threads_per_threadgroup(kSplitThreads)]] void attn_decode_split(
    device const bfloat* q [[buffer(0)]],
    device const bfloat* k_cache [[buffer(1)]],
    device const bfloat* v_cache [[buffer(2)]],
    device float* blocks_out [[buffer(3)]],      // [q_heads, blocks, head_dim + 2]: unnormalised sum, peak, total
    device const StepState& step [[buffer(4)]],
    constant AttnArgs& args [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint kMost = kSplitThreads / 32;
  threadgroup float scratch[HEADS * kMost * kScratch];
  threadgroup Softmax shares[HEADS * kMost];
  const Heads heads = heads_of(args, group.x, groups.x);
  const uint block = group.y, dim = args.head_dim;
  const uint count = step.position + 1, tiles = (count + tile_keys() - 1) / tile_keys();
  const uint block_keys = (tiles + args.blocks - 1) / args.blocks * tile_keys();
  const uint begin = min(block * block_keys, count), end = min(begin + block_keys, count);
  HeadShare share[HEADS];
  attend<HEADS>(q + heads.first * dim, heads.pack - 1, k_cache + heads.column, v_cache + heads.column, args.kv_heads * dim, dim, args.scale,
                begin, end, simdgroups, simdgroup_index, lane, scratch + simdgroup_index * kScratch, share);
  threadgroup_barrier(mem_flags::mem_threadgroup);        // weights have been read
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) publish(scratch + h * kMost * kScratch, shares + h * kMost, share[h], simdgroup_index, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  #pragma unroll
  for (uint h = 0; h < HEADS; h++) {
    if (h >= heads.pack) break;
    float factors[kMost];
    const Softmax softmax = join_factors(shares + h * kMost, simdgroups, kMost, factors);
    device float* target = blocks_out + ((heads.first + h) * args.blocks + block) * (dim + 2);
    for (uint d = thread_index; d < dim; d += threads.x) {
      float sum = 0.0f;
      #pragma unroll
      for (uint s = 0; s < kMost; s++)
        sum = fma(factors[s], s < simdgroups ? join_dim(scratch + (h * kMost + s) * kScratch, dim, d) : 0.0f, sum);
      target[d] = sum;
    }
    if (thread_index == 0) {
      target[dim] = softmax.peak;
      target[dim + 1] = softmax.total;
    }
  }
}

// Joins a head's blocks; empty blocks have total 0. grid = (q_heads, parts): the parts of a head share its dimensions, since at
// 64 blocks a threadgroup a head would be too few for a megabyte of partial sums.
template <bool GATE>
METAL_FUNC void combine(device const float* blocks_in, device bfloat* out, device const bfloat* proj, constant AttnArgs& args,
                        threadgroup float* factors, uint2 group, uint2 groups, uint thread_index, uint threads) {
  const uint head = group.x, dim = args.head_dim, stride = dim + 2;
  blocks_in += head * args.blocks * stride;
  const uint lane = thread_index % 32;
  float peak = kMasked, total = 0.0f;
  for (uint b = lane; b < args.blocks; b += 32) peak = max(peak, blocks_in[b * stride + dim]);
  peak = simd_max(peak);
  for (uint b = lane; b < args.blocks; b += 32) {         // every simdgroup for itself, the first for all
    const float block_total = blocks_in[b * stride + dim + 1];
    const float factor = block_total != 0.0f ? precise::exp(blocks_in[b * stride + dim] - peak) : 0.0f;
    if (thread_index < 32) factors[b] = factor;
    total = fma(factor, block_total, total);
  }
  total = simd_sum(total);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint d = group.y * threads + thread_index; d < dim; d += groups.y * threads) {
    constexpr uint kAtOnce = 2 * kChunk;                  // loads that do not wait for one another
    float chain[kChunk] = {0.0f};
    uint b = 0;
    for (; b + kAtOnce <= args.blocks; b += kAtOnce) {
      float value[kAtOnce];
      #pragma unroll
      for (uint i = 0; i < kAtOnce; i++) value[i] = blocks_in[(b + i) * stride + d];
      #pragma unroll
      for (uint i = 0; i < kAtOnce; i++) chain[i % kChunk] = fma(factors[b + i], value[i], chain[i % kChunk]);
    }
    for (; b < args.blocks; b++) chain[0] = fma(factors[b], blocks_in[b * stride + d], chain[0]);
    const float sum = sum_chunk(chain);
    out[head * dim + d] = bfloat(GATE ? sum / total * gate(proj, head, dim, d) : sum / total);
  }
}

// Follows attn_decode_split, packed or not.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_decode_combine(
    device const float* blocks_in [[buffer(0)]], // [q_heads, blocks, head_dim + 2]
    device bfloat* out [[buffer(1)]],            // [q_heads * head_dim]
    device const StepState& step [[buffer(2)]],
    constant AttnArgs& args [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float factors[kMaxBlocks];
  combine<false>(blocks_in, out, out, args, factors, group, groups, thread_index, threads.x);
}

// The same with the output gate.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_combine_gate(
    device const float* blocks_in [[buffer(0)]],
    device bfloat* out [[buffer(1)]],
    device const StepState& step [[buffer(2)]],
    constant AttnArgs& args [[buffer(3)]],
    device const bfloat* proj [[buffer(4)]],     // per head: query head_dim, then gate head_dim
    uint2 group [[threadgroup_position_in_grid]],
    uint2 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup float factors[kMaxBlocks];
  combine<true>(blocks_in, out, proj, args, factors, group, groups, thread_index, threads.x);
}

#define INSTANTIATE(name, kernel_function, heads) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<heads>) kernel_function<heads>;
INSTANTIATE("attn_decode", attn_decode, 1)
INSTANTIATE("attn_decode_gate", attn_decode_gate, 1)
INSTANTIATE("attn_decode_split", attn_decode_split, 1)
INSTANTIATE("attn_decode_packed", attn_decode, kPack)
INSTANTIATE("attn_decode_packed_gate", attn_decode_gate, kPack)
INSTANTIATE("attn_decode_packed_split", attn_decode_split, kPack)
