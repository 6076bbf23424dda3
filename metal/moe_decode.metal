// The mixture of experts in decode as two launches (D4): routing, gate|up and gated activation; down, weights, sum and
// residual. The shared expert is one more slot of both. One activation row; geometry: team_gemv.h, grid.y below.
#include "common.h"
#include "lanes.h"
#include "team_gemv.h"

constant constexpr uint kGateUpThreads = 64;     // hidden sizes: 2048 in one step
constant constexpr uint kDownThreads = 160;      // all slots' inputs in a row: 9 x 512 in one step
constant constexpr uint kLogitsPerLane = 16;     // up to 512 experts
constant constexpr uint kMaxTopK = 16;

// A float's order as an unsigned integer; 0 is below every value, NaN included.
METAL_FUNC uint order_key(float value) {
  const uint bits = as_type<uint>(value);
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}
METAL_FUNC float value_of_key(uint key) { return as_type<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Logits in the order of choice: greater first, the lowest expert first among equals.
METAL_FUNC bool precedes(uint key, uint expert, uint other_key, uint other_expert) {
  return key > other_key || (key == other_key && expert < other_expert);
}

struct RoutingScratch {
  uint2 best[32];                                // key and expert of each lane's best logit
  uint2 candidate[kMaxTopK * kLogitsPerLane];    // keys and experts
  uint threshold, chosen;
};

// Leaves the expert of one slot in scratch.chosen; with `weigh` also id and weight of the slot for moe_down_add. One simdgroup, the
// rules of router_topk. It takes ranks instead of top_k maxima one after another, which would be 2 top_k exchanges: a lane
// beaten by top_k other lanes' best logits holds none of the chosen, nor is one chosen below the last of those, so about top_k
// candidates are left to be ranked.
METAL_FUNC void choose_expert(device const float* logits, constant MoeGateUpArgs& args, uint slot, bool weigh, threadgroup RoutingScratch& scratch,
                              device uint* expert_ids, device float* expert_weights, uint lane) {
  if (slot >= args.top_k) {
    if (lane != 0) return;
    scratch.chosen = args.experts + slot - args.top_k;
    if (weigh) {
      expert_ids[slot] = scratch.chosen;
      expert_weights[slot] = sigmoid(logits[args.experts]);
    }
    return;
  }
  // A lane has the logits of experts lane + 32 i. Loads without a condition go together; past the end the last one again, as key 0.
  float values[kLogitsPerLane];
  uint keys[kLogitsPerLane], best_key = 0, best_expert = lane;
  #pragma unroll
  for (uint i = 0; i < kLogitsPerLane; i++) values[i] = logits[min(lane + 32 * i, args.experts - 1)];
  #pragma unroll
  for (uint i = 0; i < kLogitsPerLane; i++) {
    keys[i] = lane + 32 * i < args.experts ? order_key(values[i]) : 0;
    best_expert = keys[i] > best_key ? lane + 32 * i : best_expert;
    best_key = max(best_key, keys[i]);
  }
  scratch.best[lane] = uint2(best_key, best_expert);
  simdgroup_barrier(mem_flags::mem_threadgroup);

  uint lane_rank = 0, top_key = 0;
  #pragma unroll
  for (uint other = 0; other < 32; other++) {
    const uint2 best = scratch.best[other];
    lane_rank += precedes(best.x, best.y, best_key, best_expert) ? 1 : 0;
    top_key = max(top_key, best.x);
  }
  // No chosen logit is below the last of the top_k best lanes' best ones.
  if (lane_rank == args.top_k - 1) scratch.threshold = best_key;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const uint threshold = max(scratch.threshold, 1u);
  uint held = 0;
  if (lane_rank < args.top_k)
    #pragma unroll
    for (uint i = 0; i < kLogitsPerLane; i++) held += keys[i] >= threshold ? 1 : 0;
  uint at = simd_prefix_exclusive_sum(held);
  const uint candidates = simd_sum(held);
  if (held > 0)
    #pragma unroll
    for (uint i = 0; i < kLogitsPerLane; i++)
      if (keys[i] >= threshold) scratch.candidate[at++] = uint2(keys[i], lane + 32 * i);
  simdgroup_barrier(mem_flags::mem_threadgroup);

  const float top = value_of_key(top_key);
  float mine = 0.0f, total = 0.0f;
  bool found = false;
  for (uint c = lane; c < candidates; c += 32) {
    const uint key = scratch.candidate[c].x, expert = scratch.candidate[c].y;
    uint rank = 0;
    for (uint other = 0; other < candidates; other++) {
      const uint2 rival = scratch.candidate[other];
      rank += precedes(rival.x, rival.y, key, expert) ? 1 : 0;
    }
    if (rank >= args.top_k) continue;
    const float score = weigh ? precise::exp(value_of_key(key) - top) : 0.0f;
    total += score;
    if (rank == slot) {
      found = true;
      mine = score;
      scratch.chosen = expert;
    }
  }
  if (!weigh) return;
  if (!args.normalise) {
    total = 0.0f;
    for (uint expert = lane; expert < args.experts; expert += 32) total += precise::exp(logits[expert] - top);
  }
  total = simd_sum(total);
  if (found) {
    expert_ids[slot] = scratch.chosen;
    expert_weights[slot] = mine / total;
  }
}

template <typename Matrix>
struct GateUpJob {
  using Row = typename Matrix::Row;
  Matrix matrix;
  device const bfloat* h;
  device const float* weight;
  device bfloat* act;
  uint first, width;       // of this expert: its first gate row; up rows follow after `width`
  float eps, inputs;
  bool normed;
  uint blocks;
  float square;

  METAL_FUNC ActivationBlock load(uint block, bool active) {
    if (!normed) return load_activations(h + block * kBlock);
    float own = 0.0f;
    const ActivationBlock x = load_normed(h + block * kBlock, weight + block * kBlock, own);
    if (active) square += own;
    return x;
  }
  METAL_FUNC void accumulate(uint output, uint which, uint block, thread const ActivationBlock& x, thread float* sum, thread float& rest) const {
    matrix.accumulate(first + which * width + output, block, x, sum, rest);
  }
  METAL_FUNC Row fetch(uint output, uint which, uint block) const { return matrix.fetch(first + which * width + output, block); }
  METAL_FUNC void multiply(thread const Row& row, thread const ActivationBlock& x, thread float& total) const {
    matrix.multiply(row, x, total);
  }
  METAL_FUNC bool needs_square() const { return normed; }
  METAL_FUNC void store(uint output, thread const float* sums, float square) const {
    const float scale = normed ? fast::rsqrt(fast::divide(square, inputs) + eps) : 1.0f;
    act[output] = bfloat(silu(sums[0] * scale) * (sums[1] * scale));
  }
};

// After the router's GEMV: act[slot] = silu(gate x) * (up x) of the slot's expert. grid = (., slots). With topk every threadgroup
// finds its expert in the logits itself, which costs less than a stage of its own, and the first of each slot leaves id and
// weight for moe_down_add. A gate row and its up row meet in one thread, so the activation needs no exchange.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kGateUpThreads)]] void moe_gate_up(
    device const uint4* w [[buffer(0)]],               // [matrices, 2 width, k]
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* h [[buffer(3)]],              // [k]
    device bfloat* act [[buffer(4)]],                  // [slots, width]
    constant MoeGateUpArgs& args [[buffer(5)]],
    device const float* weight [[buffer(6)]],          // [k], of the norm; read when normed
    device const float* logits [[buffer(7)]],          // [experts], then the shared expert's gate; read when topk
    device uint* expert_ids [[buffer(8)]],             // [slots], written when topk, else read
    device float* expert_weights [[buffer(9)]],        // [slots], written when topk
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[team_scratch(kGateUpThreads)];
  threadgroup RoutingScratch routing;
  const uint slot = group.y, blocks = args.k / kBlock;
  GateUpJob<QuantMatrix<BITS, GROUP>> job{{w, scales, biases, blocks}, h, weight, act + slot * args.width,
                                          0, args.width, args.eps, float(args.k), args.normed != 0, blocks, 0.0f};
  // The inputs are on their way while the expert is found. (Several steps add up their squares: not twice.)
  TeamInputs inputs;
  inputs.loaded = false;
  if (prefetch_rows()) {
    const Team team = make_team(blocks, thread_id, threads.x);
    inputs.loaded = team.steps == 1;
    if (inputs.loaded) load_inputs(job, team, 0, inputs);
  }
  uint expert;
  if (args.topk) {
    if (thread_id < 32) choose_expert(logits, args, slot, group.x == 0, routing, expert_ids, expert_weights, thread_id);
    team_barrier(threads.x);
    expert = routing.chosen;
  } else {
    expert = expert_ids[slot];
  }
  if (expert >= args.matrices) return;                 // an expert kept elsewhere, in another format
  job.first = expert * 2 * args.width;
  team_gemv<2>(job, args.width, scratch, group.x, groups.x, thread_id, threads.x, inputs);
}

template <typename Matrix>
struct DownJob {
  using Row = typename Matrix::Row;
  Matrix matrix;                       // its blocks: of one slot
  device const bfloat* act;
  device bfloat* h;
  device const uint* expert_ids;
  device const float* expert_weights;
  uint n, matrices;
  uint blocks;                         // of all slots
  float square;

  METAL_FUNC ActivationBlock load(uint block, bool) const {
    ActivationBlock x = load_activations(act + block * kBlock);
    const uint slot = block / matrix.blocks;
    const bool foreign = expert_ids[slot] >= matrices;             // its part of act was never written
    const float weight = foreign ? 0.0f : expert_weights[slot];
    for (uint i = 0; i < kBlock; i++) x.value[i] = foreign ? 0.0f : x.value[i] * weight;
    if (foreign) x.sum = x.nibble_offset = 0.0f;
    x.sum *= weight;
    x.nibble_offset *= weight;
    return x;
  }
  METAL_FUNC void accumulate(uint output, uint, uint block, thread const ActivationBlock& x, thread float* sum, thread float& rest) const {
    const uint expert = expert_ids[block / matrix.blocks];
    if (expert < matrices) matrix.accumulate(expert * n + output, block % matrix.blocks, x, sum, rest);
  }
  METAL_FUNC Row fetch(uint output, uint, uint block) const {
    const uint expert = expert_ids[block / matrix.blocks];
    return matrix.fetch((expert < matrices ? expert : 0) * n + output, block % matrix.blocks);
  }
  METAL_FUNC void multiply(thread const Row& row, thread const ActivationBlock& x, thread float& total) const {
    matrix.multiply(row, x, total);
  }
  METAL_FUNC bool needs_square() const { return false; }
  METAL_FUNC void store(uint output, thread const float* sums, float) const {
    h[output] = bfloat(float(h[output]) + sums[0]);
  }
};

// End of the layer: h += sum over slots of weight * (down act), one row of length slots * k whose pieces lie in different experts:
// each output is finished by one thread, so weights, sum and residual need no further launch.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kDownThreads)]] void moe_down_add(
    device const uint4* w [[buffer(0)]],               // [matrices, n, k]
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* act [[buffer(3)]],            // [slots, k]
    device bfloat* h [[buffer(4)]],                    // [n], h += ...
    constant MoeDownArgs& args [[buffer(5)]],
    device const uint* expert_ids [[buffer(6)]],       // [slots]
    device const float* expert_weights [[buffer(7)]],  // [slots]
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[team_scratch(kDownThreads)];
  const uint blocks = args.k / kBlock;
  DownJob<QuantMatrix<BITS, GROUP>> job{{w, scales, biases, blocks}, act, h, expert_ids, expert_weights, args.n, args.matrices, args.slots * blocks, 0.0f};
  team_gemv<1>(job, args.n, scratch, group.x, groups.x, thread_id, threads.x);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
#define INSTANTIATE_QUANT(bits, group)                                       \
  INSTANTIATE("moe_gate_up_b" #bits "_g" #group, moe_gate_up, bits, group)   \
  INSTANTIATE("moe_down_add_b" #bits "_g" #group, moe_down_add, bits, group)

INSTANTIATE_QUANT(4, 32)
INSTANTIATE_QUANT(4, 64)
INSTANTIATE_QUANT(4, 128)
INSTANTIATE_QUANT(8, 32)
INSTANTIATE_QUANT(8, 64)
INSTANTIATE_QUANT(8, 128)
