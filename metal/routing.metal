// Routing of a mixture of experts, entirely on the GPU (P2): choose, sort by expert, map tiles, combine.
#include <metal_stdlib>
#include "common.h"
using namespace metal;

constant constexpr uint kRouterLanes = 32;        // router_topk: one simdgroup, one row per grid.x
constant constexpr uint kLogitsPerLane = 16;      // up to 512 experts
constant constexpr uint kMaxTopK = 16;
constant constexpr uint kPlanThreads = 256;       // route_plan: one threadgroup
constant constexpr uint kPlanSimdgroups = kPlanThreads / 32;
constant constexpr uint kMaxExperts = 544;        // route_plan: 512 routed and 32 shared; checked by the host
constant constexpr uint kExpertsPerThread = (kMaxExperts + kPlanThreads - 1) / kPlanThreads;
constant constexpr uint kNoExpert = 0xffffffffu;  // block map entries past the last block
constant constexpr uint kCombineThreads = 64;
constant constexpr uint kCombineColumns = 8;      // per thread; grid = (ceil(n / (8 * threads per group)), rows)

// A float's order as an unsigned integer; 0 is below every value, NaN included.
METAL_FUNC uint order_key(float value) {
  const uint bits = as_type<uint>(value);
  return max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
}
METAL_FUNC float value_of_key(uint key) { return as_type<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// Every layer, both phases, after the router's GEMV: top-k of the softmax, lowest id first among equals, renormalised
// over the chosen; the shared expert follows as experts + j for each of its parts j, all with weight sigmoid(its one gate logit).
// Softmax is monotonic and its denominator cancels in the renormalised weights, so scores are compared as logits.
[[kernel, max_total_threads_per_threadgroup(kRouterLanes)]] void router_topk(
    device const float* logits [[buffer(0)]],          // [rows, ld]
    device const float* shared_logits [[buffer(1)]],   // [rows, ld_shared]
    device uint* expert_ids [[buffer(2)]],             // [rows, top_k + shared_slots]
    device float* weights [[buffer(3)]],               // the same shape
    constant RouterArgs& args [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  device const float* logit = logits + row * args.ld;
  uint key[kLogitsPerLane];                            // expert lane + 32 i; 0 once taken
  for (uint i = 0; i < kLogitsPerLane; i++) {
    const uint expert = lane + 32 * i;
    key[i] = expert < args.experts ? order_key(logit[expert]) : 0;
  }
  uint my_id = 0, top_key = 0, my_key = 0;             // lane j keeps the j-th choice
  for (uint choice = 0; choice < args.top_k; choice++) {
    uint best = 0;
    for (uint i = 0; i < kLogitsPerLane; i++) best = max(best, key[i]);
    const uint winner_key = simd_max(best);
    uint candidate = kNoExpert;
    for (uint i = kLogitsPerLane; i > 0; i--)
      if (key[i - 1] == winner_key) candidate = lane + 32 * (i - 1);
    const uint winner = simd_min(candidate);
    for (uint i = 0; i < kLogitsPerLane; i++)
      if (lane + 32 * i == winner) key[i] = 0;
    if (choice == 0) top_key = winner_key;
    if (lane == choice) { my_id = winner; my_key = winner_key; }
  }
  const float top = value_of_key(top_key);
  const float score = lane < args.top_k ? exp(value_of_key(my_key) - top) : 0.0f;
  float total = score;                                 // over the chosen; without renormalisation over all
  if (!args.normalise) {
    total = 0.0f;
    for (uint expert = lane; expert < args.experts; expert += 32) total += exp(logit[expert] - top);
  }
  total = simd_sum(total);
  const uint slots = args.top_k + args.shared_slots;
  if (lane < args.top_k) {
    expert_ids[row * slots + lane] = my_id;
    weights[row * slots + lane] = score / total;
  }
  for (uint shared = lane; shared < args.shared_slots; shared += 32) {
    expert_ids[row * slots + args.top_k + shared] = args.experts + shared;
    weights[row * slots + args.top_k + shared] = 1.0f / (1.0f + exp(-shared_logits[row * args.ld_shared]));
  }
}

// The tiles of a plan: experts are cut into tiles of `tile` rows; with a tail list, what is left of an expert goes there when it fits
// `tail_tile` rows. No tail list: tail_tile 0.
struct TileLists {
  device uint4* map;
  device uint4* tail;
  uint tile, max_blocks, tail_tile, max_tail;
};

// {rows, tiles, tail tiles} of an expert.
METAL_FUNC uint3 count_tiles(thread const TileLists& lists, uint rows) {
  const uint rest = rows % lists.tile;
  const bool tail = rest > 0 && rest <= lists.tail_tile;
  return uint3(rows, rows / lists.tile + (rest > 0 && !tail ? 1 : 0), tail ? 1 : 0);
}

// Sorts the (row, slot) pairs by expert and lists the tiles the grouped GEMMs run. A stable counting sort, so results never
// depend on which thread came first: each simdgroup counts and later places one contiguous run of pairs.
METAL_FUNC void plan_routes(device const uint* expert_ids, device uint* offsets, device uint* sorted_rows, device uint* row_pos,
                            uint total, uint experts, thread const TileLists& lists, threadgroup atomic_uint* count,
                            threadgroup uint3* simdgroup_counts, uint thread_id, uint simdgroup, uint lane) {
  for (uint i = thread_id; i < kPlanSimdgroups * kMaxExperts; i += kPlanThreads) atomic_store_explicit(&count[i], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Histogram of this simdgroup's run.
  const uint run = (total + kPlanThreads - 1) / kPlanThreads * 32;
  const uint run_begin = min(total, simdgroup * run), run_end = min(total, run_begin + run);
  threadgroup atomic_uint* mine = count + simdgroup * kMaxExperts;
  for (uint i = run_begin + lane; i < run_end; i += 32) atomic_fetch_add_explicit(&mine[expert_ids[i]], 1u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Exclusive scan over experts, of rows and of tiles; a thread owns kExpertsPerThread neighbouring experts.
  uint rows[kExpertsPerThread];
  uint3 own = uint3(0);
  for (uint i = 0; i < kExpertsPerThread; i++) {
    const uint expert = thread_id * kExpertsPerThread + i;
    rows[i] = 0;
    if (expert < experts)
      for (uint s = 0; s < kPlanSimdgroups; s++) rows[i] += atomic_load_explicit(&count[s * kMaxExperts + expert], memory_order_relaxed);
    own += count_tiles(lists, rows[i]);
  }
  uint3 sum = uint3(simd_prefix_exclusive_sum(own.x), simd_prefix_exclusive_sum(own.y), simd_prefix_exclusive_sum(own.z));
  if (lane == 31) simdgroup_counts[simdgroup] = sum + own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint3 all = uint3(0);
  for (uint s = 0; s < kPlanSimdgroups; s++) {
    if (s < simdgroup) sum += simdgroup_counts[s];
    all += simdgroup_counts[s];
  }
  uint row = sum.x, block = sum.y, tail = sum.z;
  for (uint i = 0; i < kExpertsPerThread; i++) {
    const uint expert = thread_id * kExpertsPerThread + i;
    if (expert >= experts) break;
    offsets[expert] = row;
    const uint3 tiles = count_tiles(lists, rows[i]);
    uint done = 0;
    for (uint b = 0; b < tiles.y; b++, done += lists.tile, block++)
      if (block < lists.max_blocks) lists.map[block] = uint4(expert, row + done, min(lists.tile, rows[i] - done), 0);
    if (tiles.z) {
      if (tail < lists.max_tail) lists.tail[tail] = uint4(expert, row + done, rows[i] - done, 0);
      tail++;
    }
    for (uint s = 0; s < kPlanSimdgroups; s++) {       // counts become places
      const uint n = atomic_load_explicit(&count[s * kMaxExperts + expert], memory_order_relaxed);
      atomic_store_explicit(&count[s * kMaxExperts + expert], row, memory_order_relaxed);
      row += n;
    }
  }
  if (thread_id == 0) offsets[experts] = total;
  for (uint i = all.y + thread_id; i < lists.max_blocks; i += kPlanThreads) lists.map[i] = uint4(kNoExpert, 0, 0, 0);
  for (uint i = all.z + thread_id; i < lists.max_tail; i += kPlanThreads) lists.tail[i] = uint4(kNoExpert, 0, 0, 0);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Placement, 32 pairs at a time in order: a pair follows those of its expert in lower lanes.
  for (uint begin = run_begin; begin < run_end; begin += 32) {
    const uint in_batch = min(32u, run_end - begin);
    const bool active = lane < in_batch;
    uint expert = 0, before = 0, same = 0, place = 0;
    if (active) {
      expert = expert_ids[begin + lane];
      for (uint j = 0; j < in_batch; j++) {
        const uint equal = expert_ids[begin + j] == expert ? 1u : 0u;
        same += equal;
        before += j < lane ? equal : 0u;
      }
      place = atomic_load_explicit(&mine[expert], memory_order_relaxed) + before;
      sorted_rows[place] = begin + lane;
      row_pos[begin + lane] = place;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);     // every lane has read its expert's place
    if (active && before + 1 == same) atomic_store_explicit(&mine[expert], place + 1, memory_order_relaxed);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Prefill, once per layer (P2): one list of tiles of one size.
[[kernel, max_total_threads_per_threadgroup(kPlanThreads)]] void route_plan(
    device const uint* expert_ids [[buffer(0)]],   // [total]
    device uint* offsets [[buffer(1)]],            // [experts + 1] first sorted row of each expert
    device uint* sorted_rows [[buffer(2)]],        // [total] pair at each sorted row
    device uint* row_pos [[buffer(3)]],            // [total] sorted row of each pair
    device uint4* block_map [[buffer(4)]],         // [max_blocks] {expert, first sorted row, rows, 0}
    constant RouteArgs& args [[buffer(5)]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_uint count[kPlanSimdgroups * kMaxExperts];   // histogram, then the next free sorted row
  threadgroup uint3 simdgroup_counts[kPlanSimdgroups];
  const TileLists lists{block_map, block_map, args.tile, args.max_blocks, 0, 0};
  plan_routes(expert_ids, offsets, sorted_rows, row_pos, args.total, args.experts, lists, count, simdgroup_counts, thread_id, simdgroup, lane);
}

// The same with two lists (P3): large tiles, and small ones for the rests of experts, so that a rest of few rows is not padded to
// a large tile. Both grouped GEMMs write rows of their own and run in one level.
[[kernel, max_total_threads_per_threadgroup(kPlanThreads)]] void route_plan_split(
    device const uint* expert_ids [[buffer(0)]],
    device uint* offsets [[buffer(1)]],
    device uint* sorted_rows [[buffer(2)]],
    device uint* row_pos [[buffer(3)]],
    device uint4* block_map [[buffer(4)]],         // [max_blocks] tiles of up to `tile` rows
    constant RouteSplitArgs& args [[buffer(5)]],
    device uint4* tail_map [[buffer(6)]],          // [max_tail] tiles of up to `tail_tile` rows
    uint thread_id [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup atomic_uint count[kPlanSimdgroups * kMaxExperts];
  threadgroup uint3 simdgroup_counts[kPlanSimdgroups];
  const TileLists lists{block_map, tail_map, args.tile, args.max_blocks, args.tail_tile, args.max_tail};
  plan_routes(expert_ids, offsets, sorted_rows, row_pos, args.total, args.experts, lists, count, simdgroup_counts, thread_id, simdgroup, lane);
}

// End of the experts: h += sum over a row's slots of weight * expert output, in slot order and f32.
[[kernel, max_total_threads_per_threadgroup(kCombineThreads)]] void moe_combine(
    device bfloat* h [[buffer(0)]],                // [rows, n]
    device const bfloat* y [[buffer(1)]],          // [rows * slots, n]
    device const float* weights [[buffer(2)]],     // [rows, slots]
    device const uint* row_pos [[buffer(3)]],      // y's row of each (row, slot), when y is sorted by expert
    constant CombineArgs& args [[buffer(4)]],
    uint3 thread_id [[thread_position_in_grid]]) {
  const uint column = thread_id.x * kCombineColumns, row = thread_id.y;
  if (column >= args.n) return;
  device bfloat* to = h + row * args.n + column;
  float sum[kCombineColumns];
  for (uint i = 0; i < kCombineColumns; i++) sum[i] = float(to[i]);
  for (uint slot = 0; slot < args.slots; slot++) {
    const uint pair = row * args.slots + slot;
    const float weight = weights[pair];
    device const bfloat* from = y + (args.sorted ? row_pos[pair] : pair) * args.n + column;
    for (uint i = 0; i < kCombineColumns; i++) sum[i] = fma(weight, float(from[i]), sum[i]);
  }
  for (uint i = 0; i < kCombineColumns; i++) to[i] = bfloat(sum[i]);
}
