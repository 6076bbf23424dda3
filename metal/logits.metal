// What a request asks of the logits beyond temperature and the filters: penalties, bias, a grammar's mask, logprobs.
#include "common.h"
#include "lanes.h"
#include "sampler.h"

constant constexpr uint kMaxSimdgroups = 16;
constant constexpr uint kNone = 0xffffffffu;

METAL_FUNC bool non_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) == 0x7f800000u; }

// Called before the choice of a token when a request has penalties, a bias or a grammar; a kernel of its own, so that other
// requests do not pay for it. In place, one thread for eight ids. Counts are of generated tokens only (case 48): a step adds
// the token that it was fed, and only the thread that owns the id does so. A logit that is not finite stays as it is, also
// where the mask forbids the token, so that it is still found (case 37).
[[kernel, max_total_threads_per_threadgroup(256)]] void adjust_logits(
    device float* logits [[buffer(0)]],              // [vocab]
    device uint* counts [[buffer(1)]],               // [vocab]
    device const float* bias [[buffer(2)]],          // [vocab]
    device const uint* mask [[buffer(3)]],           // [ceil(vocab / 32)], bit set = allowed
    device const SampleParams& params [[buffer(4)]],
    device const StepState& step [[buffer(5)]],
    constant SampleArgs& args [[buffer(6)]],
    uint thread_position [[thread_position_in_grid]]) {
  const uint first = thread_position * kChunk;
  if (first >= args.vocab || step.done != LILY_RUNNING) return;
  const uint adjust = params.adjust;
  const uint fed = step.step == 0 ? kNone : step.tokens[step.step & 1];
  const uint allowed = (adjust & LILY_ADJUST_MASK) != 0 ? mask[first / 32] >> (first % 32) : 0xffu;
  for (uint i = 0; i < kChunk && first + i < args.vocab; i++) {
    const uint id = first + i;
    float x = logits[id];
    if ((adjust & LILY_ADJUST_PENALTIES) != 0) {
      uint count = counts[id];
      if (id == fed) counts[id] = ++count;
      if (count != 0) {
        x = x > 0.0f ? x / params.repetition_penalty : x * params.repetition_penalty;
        x -= params.presence_penalty + float(count) * params.frequency_penalty;
      }
    }
    if ((adjust & LILY_ADJUST_BIAS) != 0) x += bias[id];
    if ((allowed >> i & 1u) == 0 && !non_finite(x)) x = kMasked;
    logits[id] = x;
  }
}

// A token's place in the order of logprobs: by logit, the lower id first among equals. Key 0 is "none left".
struct Candidate {
  uint key, id;
};

METAL_FUNC bool before(Candidate a, Candidate b) { return a.key > b.key || (a.key == b.key && a.id < b.id); }

// The first of a thread's tokens that comes after `last`; masked ones are none.
METAL_FUNC Candidate next_candidate(device const float* logits, uint vocab, uint thread_index, uint threads, Candidate last) {
  Candidate found = {0, kNone};
  const uint least = ordered_key(kMasked);
  for (uint first = thread_index * kChunk; first < vocab; first += threads * kChunk) {
    for (uint i = 0; i < kChunk && first + i < vocab; i++) {
      const Candidate one = {ordered_key(logits[first + i]), first + i};
      if (one.key > least && before(last, one) && before(one, found)) found = one;
    }
  }
  return found;
}

// Called between sample_token and finish when a request wants logprobs, as one threadgroup: log-softmax of logit / temperature
// over the whole vocabulary for the chosen token and the likeliest ones. Each thread keeps the best of its tokens; a
// round takes the best of all, and only the thread that had it searches again.
[[kernel, max_total_threads_per_threadgroup(512)]] void token_logprobs(
    device const float* logits [[buffer(0)]],        // [vocab]
    device const SampleParams& params [[buffer(1)]],
    device const StepState& step [[buffer(2)]],
    device const uint2& sampled [[buffer(3)]],       // of sample_token: token, non-finite
    device StepLogprobs* out [[buffer(4)]],          // [LILY_HISTORY], as StepState.history
    constant SampleArgs& args [[buffer(5)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint keys[2][kMaxSimdgroups], ids[2][kMaxSimdgroups];
  threadgroup float sums[kMaxSimdgroups];
  // A step in flight past the end would overwrite what the host has not read yet.
  if (step.done != LILY_RUNNING || sampled.y != 0) return;
  const uint wanted = min(params.top_logprobs, uint(LILY_TOP_LOGPROBS));
  const float temperature = params.temperature == 0.0f ? 1.0f : params.temperature;
  device StepLogprobs& target = out[step.step % LILY_HISTORY];
  float peak = 0.0f, log_sum = 0.0f;
  Candidate own = next_candidate(logits, args.vocab, thread_index, threads, Candidate{0xffffffffu, 0});
  uint count = 0;
  for (uint round = 0; round <= wanted; round++) {
    const uint key = simd_max(own.key);
    const uint id = simd_min(own.key == key ? own.id : kNone);
    if (lane == 0) keys[round & 1][simdgroup_index] = key, ids[round & 1][simdgroup_index] = id;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Candidate best = {0, kNone};
    for (uint s = 0; s < simdgroups; s++) {
      const Candidate other = {keys[round & 1][s], ids[round & 1][s]};
      if (before(other, best)) best = other;
    }
    if (round == 0) {                                // the peak is known: the sum
      peak = key_value(best.key);
      float sum = 0.0f;
      for (uint first = thread_index * kChunk; first < args.vocab; first += threads * kChunk) {
        float part[kChunk];
        for (uint i = 0; i < kChunk; i++) {
          const float exponent = first + i < args.vocab ? (logits[first + i] - peak) / temperature : -FLT_MAX;
          part[i] = exponent < -87.0f ? 0.0f : precise::exp(exponent);
        }
        sum += sum_chunk(part);
      }
      sum = simd_sum(sum);
      if (lane == 0) sums[simdgroup_index] = sum;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float total = 0.0f;
      for (uint s = 0; s < simdgroups; s++) total += sums[s];
      log_sum = precise::log(total);
    }
    if (round == wanted || best.key == 0) break;
    if (thread_index == 0) {
      target.ids[round] = best.id;
      target.values[round] = (key_value(best.key) - peak) / temperature - log_sum;
    }
    count++;
    if (own.id == best.id) own = next_candidate(logits, args.vocab, thread_index, threads, best);
  }
  if (thread_index != 0) return;
  target.token = sampled.x;
  target.value = (logits[sampled.x] - peak) / temperature - log_sum;
  target.count = count;
}
