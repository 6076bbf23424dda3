// From logits to the next token and to the state of the next step, all on the GPU (D2: the token never waits for the CPU).
#include "common.h"
#include "lanes.h"
#include "sampler.h"

constant constexpr uint kMaxSimdgroups = 16;

// Eight logits, or those before `end`; the rest reads as the lowest float and must be left out by its id.
METAL_FUNC void load_logits(device const float* logits, uint first, uint end, thread float* value) {
  if (first + kChunk <= end) load_chunk(logits + first, value);
  else for (uint i = 0; i < kChunk; i++) value[i] = first + i < end ? logits[first + i] : -FLT_MAX;
}

// Called after the head: the largest logit of one block of the vocabulary. The lowest id wins a tie; NaN and infinities are
// found by their bits, since no comparison is to be trusted with them.
[[kernel, max_total_threads_per_threadgroup(256)]] void argmax_partial(
    device const float* logits [[buffer(0)]],  // [vocab]
    device uint2* partial [[buffer(1)]],       // [blocks]: value bits, id
    device uint* flags [[buffer(2)]],          // [blocks]: 1 when a logit is not finite
    constant ArgmaxArgs& args [[buffer(3)]],
    uint block [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint all_best[kMaxSimdgroups], all_ids[kMaxSimdgroups], all_clean[kMaxSimdgroups];
  const uint size = ((args.vocab + args.blocks - 1) / args.blocks + kChunk - 1) / kChunk * kChunk;
  const uint begin = min(block * size, args.vocab), end = min(begin + size, args.vocab);
  float best[kChunk];
  uint ids[kChunk], exponents[kChunk];         // exponents: 0x7f800000 once a logit was not finite
  for (uint i = 0; i < kChunk; i++) best[i] = -INFINITY, ids[i] = kNone, exponents[i] = 0;
  for (uint first = begin + thread_index * kChunk; first < end; first += threads * kChunk) {
    float value[kChunk];
    load_logits(logits, first, end, value);
    for (uint i = 0; i < kChunk; i++) {
      const bool better = value[i] > best[i] && first + i < end;
      best[i] = better ? value[i] : best[i];
      ids[i] = better ? first + i : ids[i];
      exponents[i] = max(exponents[i], as_type<uint>(value[i]) & 0x7f800000u);
    }
  }
  float lane_best = best[0];
  uint lane_id = ids[0], exponent = exponents[0];
  for (uint i = 1; i < kChunk; i++) {
    const bool better = best[i] > lane_best || (best[i] == lane_best && ids[i] < lane_id);
    lane_best = better ? best[i] : lane_best;
    lane_id = better ? ids[i] : lane_id;
    exponent = max(exponent, exponents[i]);
  }
  const float peak = simd_max(lane_best);
  const uint2 lowest = simd_min(uint2(lane_best == peak ? lane_id : kNone, exponent == 0x7f800000u ? 0u : 1u));
  if (lane == 0) {
    all_best[simdgroup_index] = as_type<uint>(peak);
    all_ids[simdgroup_index] = lowest.x;
    all_clean[simdgroup_index] = lowest.y;
  }
  if (simdgroups > 1) threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index != 0) return;
  float value = peak;
  uint id = lowest.x, clean = lowest.y;
  for (uint s = 1; s < simdgroups; s++) {
    const float other = as_type<float>(all_best[s]);
    if (other > value || (other == value && all_ids[s] < id)) value = other, id = all_ids[s];
    clean = min(clean, all_clean[s]);
  }
  partial[block] = uint2(as_type<uint>(value), id);
  flags[block] = 1 - clean;
}

struct Scratch {                               // threadgroup memory
  atomic_uint high[kBins], low[kBins];         // histogram of one radix digit, sums in halves
  uint2 reduced[kMaxSimdgroups];
  ulong mass[kMaxSimdgroups];
  ulong target;
  uint digit;
};

// What every thread knows about itself and the task.
struct Sampler {
  device const float* logits;
  uint vocab, thread_index, threads, simdgroups, simdgroup_index, lane;
  float peak, temperature;
};

// Largest key K with: measure of keys above K < target <= measure of keys from K on. Four rounds of 8 bits, from the top:
// a histogram of the digit among keys that share the prefix found so far, then the bin in which the target falls.
METAL_FUNC uint select_key(thread const Sampler& s, Selection selection, threadgroup Scratch& scratch) {
  uint prefix = 0;
  for (uint round = 0; round < 4; round++) {
    const uint shift = 24 - 8 * round;
    for (uint bin = s.thread_index; bin < kBins; bin += s.threads) {
      atomic_store_explicit(&scratch.high[bin], 0u, memory_order_relaxed);
      atomic_store_explicit(&scratch.low[bin], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint first = s.thread_index * kChunk; first < s.vocab; first += s.threads * kChunk) {
      float value[kChunk];
      load_logits(s.logits, first, s.vocab, value);
      for (uint i = 0; i < kChunk; i++) {
        const uint key = ordered_key(value[i]);
        if (key < selection.floor || first + i >= s.vocab || (round != 0 && key >> (shift + 8) != prefix)) continue;
        uint2 measure = uint2(0, 1);
        if (selection.by_weight) measure = halves(token_weight(value[i], s.peak, s.temperature));
        const uint bin = key >> shift & (kBins - 1);
        if (measure.x != 0) atomic_fetch_add_explicit(&scratch.high[bin], measure.x, memory_order_relaxed);
        if (measure.y != 0) atomic_fetch_add_explicit(&scratch.low[bin], measure.y, memory_order_relaxed);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (s.simdgroup_index == 0) {              // a lane takes 8 bins; lane 0 the largest
      constexpr uint kLaneBins = kBins / 32;
      uint2 bins[kLaneBins], own = uint2(0, 0);
      for (uint i = 0; i < kLaneBins; i++) {
        const uint bin = kBins - 1 - s.lane * kLaneBins - i;
        bins[i] = uint2(atomic_load_explicit(&scratch.high[bin], memory_order_relaxed),
                        atomic_load_explicit(&scratch.low[bin], memory_order_relaxed));
        own += bins[i];
      }
      const ulong above = joined(uint2(simd_prefix_exclusive_sum(own.x), simd_prefix_exclusive_sum(own.y)));
      if (round == 0 && selection.by_weight) {
        bool rest;
        const ulong target = scaled(joined(simd_sum(own)), selection.fraction, rest);
        selection.target = max(target + (rest ? 1 : 0), ulong(1));
      }
      ulong sum = above;
      if (above < selection.target && selection.target <= above + joined(own)) {
        for (uint i = 0; i < kLaneBins; i++) {
          const ulong next = sum + joined(bins[i]);
          if (selection.target <= next) {
            scratch.digit = kBins - 1 - s.lane * kLaneBins - i;
            scratch.target = selection.target - sum;
            break;
          }
          sum = next;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    prefix = prefix << 8 | scratch.digit;
    selection.target = scratch.target;
  }
  return prefix;
}

// Weight of a token that passed every filter, else 0.
METAL_FUNC uint kept_weight(thread const Sampler& s, float logit, uint floor, uint least) {
  if (ordered_key(logit) < floor) return 0;
  const uint weight = token_weight(logit, s.peak, s.temperature);
  return weight < least ? 0 : weight;
}

// Called after the argmax when temperature is not 0: top-k, top-p, min-p and the draw in one threadgroup. Ties at a
// threshold stay together, so ids play no role in what is kept; top-p keeps a token when the tokens above it hold less than
// top_p of what top-k left.
[[kernel, max_total_threads_per_threadgroup(512)]] void sample_token(
    device const float* logits [[buffer(0)]],      // [vocab], vocab <= 2^18
    device const SampleParams& params [[buffer(1)]],
    device const StepState& step [[buffer(2)]],
    device uint2& out [[buffer(3)]],               // token, 1 when a logit is not finite
    constant SampleArgs& args [[buffer(4)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup Scratch scratch;
  Sampler s;
  s.logits = logits, s.vocab = args.vocab, s.thread_index = thread_index, s.threads = threads;
  s.simdgroups = simdgroups, s.simdgroup_index = simdgroup_index, s.lane = lane;

  // The peak; and the smallest of the threads' own peaks, which at least `threads` tokens reach: for top_k <= threads it
  // bounds the threshold from below, so that the first histogram sees few tokens.
  uint highest = 0, exponent = 0;
  for (uint first = thread_index * kChunk; first < args.vocab; first += threads * kChunk) {
    float value[kChunk];
    load_logits(logits, first, args.vocab, value);
    for (uint i = 0; i < kChunk; i++) {
      if (first + i >= args.vocab) continue;
      highest = max(highest, ordered_key(value[i]));
      exponent = max(exponent, as_type<uint>(value[i]) & 0x7f800000u);
    }
  }
  // One exchange for three extremes: complements turn maxima into minima.
  const uint4 extremes = simd_min(uint4(highest, ~highest, exponent == 0x7f800000u ? 0u : 1u, 0u));
  if (lane == 0) scratch.reduced[simdgroup_index] = uint2(extremes.x, extremes.z == 0 ? 0u : extremes.y);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint bound = 0xffffffffu, complement = 0xffffffffu;
  for (uint i = 0; i < simdgroups; i++) {
    bound = min(bound, scratch.reduced[i].x);
    complement = min(complement, scratch.reduced[i].y);
  }
  // Finite keys lie strictly between 0 and 2^32 - 1, so a complement of 0 is free to mean "not finite".
  if (complement == 0) {
    if (thread_index == 0) out = uint2(0, 1);
    return;
  }
  s.peak = key_value(~complement);
  s.temperature = params.temperature;

  uint floor = 0;
  const bool greedy = s.temperature == 0.0f;
  if (!greedy && params.top_k != 0 && params.top_k < args.vocab) {
    Selection selection;
    selection.floor = params.top_k <= threads ? bound : 0;
    selection.target = params.top_k, selection.by_weight = false, selection.fraction = 0;
    floor = select_key(s, selection, scratch);
  }
  if (!greedy && params.top_p < 1.0f) {
    Selection selection;
    selection.floor = floor, selection.target = 0, selection.by_weight = true;
    selection.fraction = uint(max(params.top_p, 0.0f) * 4294967296.0f);
    floor = select_key(s, selection, scratch);
  }
  const uint least = greedy ? 0 : uint(ceil(clamp(params.min_p, 0.0f, 1.0f) * float(kWeightOne)));

  // Inverse CDF in id order: a simdgroup's share is a contiguous range, in tiles of 256 ids.
  constexpr uint kTile = 32 * kChunk;
  const uint span = (args.vocab + simdgroups * kTile - 1) / (simdgroups * kTile) * kTile;
  const uint begin = min(simdgroup_index * span, args.vocab), end = min(begin + span, args.vocab);
  uint2 own = uint2(0, 0);
  for (uint first = begin + lane * kChunk; first < end; first += kTile) {
    float value[kChunk];
    load_logits(logits, first, end, value);
    for (uint i = 0; i < kChunk; i++)
      if (first + i < end) own += halves(kept_weight(s, value[i], floor, least));
  }
  own = simd_sum(own);
  if (lane == 0) scratch.mass[simdgroup_index] = joined(own);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong total = 0, before = 0;
  for (uint i = 0; i < simdgroups; i++) {
    if (i < simdgroup_index) before += scratch.mass[i];
    total += scratch.mass[i];
  }
  const uint2 random = philox(uint2(params.seed_lo, params.seed_hi), step.step);
  const ulong draw = greedy ? 0 : uniform_below(total, random.x, random.y);
  if (draw < before || draw >= before + joined(own)) return;   // one simdgroup goes on

  for (uint tile = begin; tile < end; tile += kTile) {
    const uint first = tile + lane * kChunk;
    float value[kChunk];
    uint weight[kChunk];
    load_logits(logits, first, end, value);
    uint2 sum = uint2(0, 0);
    for (uint i = 0; i < kChunk; i++) {
      weight[i] = first + i < end ? kept_weight(s, value[i], floor, least) : 0;
      sum += halves(weight[i]);
    }
    const ulong tile_mass = joined(simd_sum(sum));
    if (draw < before + tile_mass) {
      ulong reached = before + joined(uint2(simd_prefix_exclusive_sum(sum.x), simd_prefix_exclusive_sum(sum.y)));
      if (draw < reached || draw >= reached + joined(sum)) return;
      for (uint i = 0; i < kChunk; i++) {
        if (draw < reached + weight[i]) {
          out = uint2(first + i, 0);
          return;
        }
        reached += weight[i];
      }
    }
    before += tile_mass;
  }
}

// Last kernel of a step, one simdgroup: takes the winner of the blocks (or the sampler's token), hands it to the next step
// (D2: the other of two token slots) and advances the state. After a stop id or a non-finite logit nothing advances any
// more, so steps already in flight find the state they must leave alone.
[[kernel, max_total_threads_per_threadgroup(32)]] void finish(
    device const uint2* partial [[buffer(0)]],   // [blocks] of argmax_partial
    device const uint* flags [[buffer(1)]],      // [blocks]
    device StepState& step [[buffer(2)]],
    device const uint* stop_ids [[buffer(3)]],   // [stop_count]
    constant FinishArgs& args [[buffer(4)]],
    device const uint2& sampled [[buffer(5)]],   // of sample_token: token, non-finite
    uint lane [[thread_index_in_simdgroup]]) {
  float best = -INFINITY;
  uint id = kNone, clean = 1;
  const uint blocks = args.sample != 0 ? 0 : args.blocks;
  for (uint b = lane; b < blocks; b += 32) {
    const float value = as_type<float>(partial[b].x);
    if (value > best || (value == best && partial[b].y < id)) best = value, id = partial[b].y;
    clean = min(clean, flags[b] == 0 ? 1u : 0u);
  }
  const float peak = simd_max(best);
  const uint2 lowest = simd_min(uint2(best == peak ? id : kNone, clean));
  if (lane != 0 || step.done != LILY_RUNNING) return;
  const uint token = args.sample != 0 ? sampled.x : lowest.x;
  const bool broken = args.sample != 0 ? sampled.y != 0 : lowest.y == 0;
  const uint index = step.step;
  uint done = broken ? LILY_NONFINITE : LILY_RUNNING;
  if (!broken) {
    for (uint i = 0; i < args.stop_count; i++) done = token == stop_ids[i] ? LILY_STOPPED : done;
    step.tokens[(index + 1) & 1] = token;
    step.position += args.rows;
    step.slot = (step.slot + 1) % LILY_RING_SLOTS;
  }
  step.history[index % LILY_HISTORY] = token;
  step.flags[index % LILY_HISTORY] = done;
  step.done = done;
  step.step = index + 1;
}

// Last kernel of a prefill chunk that samples nothing. One thread.
[[kernel, max_total_threads_per_threadgroup(32)]] void advance(
    device StepState& step [[buffer(0)]],
    constant AdvanceArgs& args [[buffer(1)]],
    uint thread_index [[thread_position_in_grid]]) {
  if (thread_index != 0 || step.done != LILY_RUNNING) return;
  step.position += args.rows;
  step.slot = (step.slot + 1) % LILY_RING_SLOTS;
}
