// Causal attention of many query rows: flash attention on simdgroup matrices; scores never leave the threadgroup.
#include "common.h"
#include "lanes.h"
#include <metal_simdgroup_matrix>

// Set by the host for the model's head_dim: with constant trip counts the loops over tiles unroll, so that every index into
// an array of matrices is a constant and the arrays stay in registers. Without it the value in args serves.
constant uint kHeadDim [[function_constant(0)]];

constant constexpr uint kTile = 8;             // a simdgroup matrix is 8 x 8
constant constexpr uint kKeys = 32;            // keys per step
constant constexpr uint kGroups = kKeys / kTile;
constant constexpr uint kMaxTiles = 32;        // head_dim up to 256
constant constexpr uint kMaxSimdgroups = 4;

// Eight rows x 32 columns into threadgroup memory, zeros for rows that do not exist. For the edges only: whole tiles are
// loaded straight from where they are.
METAL_FUNC void stage_rows(threadgroup bfloat* stage, device const bfloat* source, uint stride, uint rows, uint lane) {
  simdgroup_barrier(mem_flags::mem_threadgroup);          // what was staged before has been used
  const uint row = lane / kQuad, column = lane % kQuad * kChunk;
  float value[kChunk] = {0.0f};
  if (row < rows) load_chunk(source + ulong(row) * stride + column, value);
  for (uint i = 0; i < kChunk; i++) stage[row * kKeys + column + i] = bfloat(value[i]);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Prefill attention of one head. Each simdgroup owns 8 query rows, independent of its neighbours (which find the same keys in
// cache), and walks the keys 32 at a time: scores as S^T = K Q^T, so that keys load without a transpose; running softmax
// with the queries' lanes in quads; O += P V with P kept in f32. Rows past `rows` and keys past a row's own position weigh
// nothing and are not read. O is rescaled by a diagonal matrix, and only when a row met a new largest score.
[[kernel, max_total_threads_per_threadgroup(128)]] void attn_prefill(
    device const bfloat* q [[buffer(0)]],        // [rows, q_heads * head_dim]
    device const bfloat* k_cache [[buffer(1)]],  // [capacity, kv_heads * head_dim], rows up to position + rows valid
    device const bfloat* v_cache [[buffer(2)]],
    device bfloat* out [[buffer(3)]],            // [rows, q_heads * head_dim]
    device const StepState& step [[buffer(4)]],
    constant AttnArgs& args [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float all_scores[kMaxSimdgroups][kTile * kKeys];
  threadgroup bfloat all_stages[kMaxSimdgroups][kTile * kKeys];
  threadgroup float all_diagonals[kMaxSimdgroups][kTile * kTile];
  threadgroup float* scores = all_scores[simdgroup_index];
  threadgroup bfloat* stage = all_stages[simdgroup_index];
  threadgroup float* diagonal = all_diagonals[simdgroup_index];

  const uint dim = is_function_constant_defined(kHeadDim) ? kHeadDim : args.head_dim, tiles = dim / kTile;
  const uint head = group.x, first_row = (group.y * simdgroups + simdgroup_index) * kTile;
  if (first_row >= args.rows) return;                     // no threadgroup barrier below: simdgroups may leave alone
  const uint live_rows = min(kTile, args.rows - first_row);
  const uint total = step.position + args.rows;           // keys that exist
  const uint end = step.position + first_row + live_rows; // keys that some row here may see
  const uint q_stride = args.q_heads * dim, kv_stride = args.kv_heads * dim;
  q += ulong(first_row) * q_stride + head * dim;
  out += ulong(first_row) * q_stride + head * dim;
  k_cache += head / (args.q_heads / args.kv_heads) * dim;
  v_cache += head / (args.q_heads / args.kv_heads) * dim;

  simdgroup_bfloat8x8 query[kMaxTiles];                   // Q^T: [dim tile][8 dims, 8 queries]
  simdgroup_float8x8 output[kMaxTiles];                   // O: [dim tile][8 queries, 8 dims]
  if (live_rows == kTile) {
    #pragma clang loop unroll(full)
    for (uint d = 0; d < tiles; d++) simdgroup_load(query[d], q + d * kTile, q_stride, ulong2(0), true);
  } else {
    #pragma clang loop unroll(full)
    for (uint slab = 0; slab < tiles; slab += kGroups) {
      stage_rows(stage, q + slab * kTile, q_stride, live_rows, lane);
      #pragma clang loop unroll(full)
      for (uint j = 0; j < kGroups; j++) simdgroup_load(query[slab + j], stage + j * kTile, kKeys, ulong2(0), true);
    }
  }
  #pragma clang loop unroll(full)
  for (uint d = 0; d < tiles; d++) output[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  const uint row = lane / kQuad, part = lane % kQuad;     // of the softmax: a quad per query, 8 keys per lane
  const uint visible = min(step.position + first_row + row + 1, end);
  for (uint i = 0; i < 2; i++) diagonal[lane * 2 + i] = 0.0f;
  float peak = kMasked, sum = 0.0f;

  for (uint tile = 0; tile < end; tile += kKeys) {
    const uint groups = min((end - tile + kTile - 1) / kTile, kGroups);
    const bool whole = tile + groups * kTile <= total;    // every group of 8 keys lies inside the cache's valid rows
    simdgroup_float8x8 score[kGroups];                    // S^T: [8 keys, 8 queries]
    #pragma clang loop unroll(full)
    for (uint g = 0; g < kGroups; g++) score[g] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    device const bfloat* keys = k_cache + ulong(tile) * kv_stride;
    device const bfloat* values = v_cache + ulong(tile) * kv_stride;
    if (whole) {
      #pragma clang loop unroll(full)
      for (uint d = 0; d < tiles; d++)
        #pragma clang loop unroll(full)
        for (uint g = 0; g < kGroups; g++) {
          if (g >= groups) continue;
          simdgroup_bfloat8x8 key;
          simdgroup_load(key, keys + ulong(g * kTile) * kv_stride + d * kTile, kv_stride);
          simdgroup_multiply_accumulate(score[g], key, query[d], score[g]);
        }
    } else {
      #pragma clang loop unroll(full)
      for (uint g = 0; g < kGroups; g++) {
        if (g >= groups) continue;
        const uint live = min(kTile, total - tile - g * kTile);
        #pragma clang loop unroll(full)
        for (uint slab = 0; slab < tiles; slab += kGroups) {
          stage_rows(stage, keys + ulong(g * kTile) * kv_stride + slab * kTile, kv_stride, live, lane);
          #pragma clang loop unroll(full)
          for (uint j = 0; j < kGroups; j++) {
            simdgroup_bfloat8x8 key;
            simdgroup_load(key, stage + j * kTile, kKeys);
            simdgroup_multiply_accumulate(score[g], key, query[slab + j], score[g]);
          }
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);        // the last step's weights have been used
    #pragma clang loop unroll(full)
    for (uint g = 0; g < kGroups; g++) simdgroup_store(score[g], scores + g * kTile, kKeys, ulong2(0), true);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    threadgroup float* own = scores + row * kKeys + part * kChunk;
    float weight[kChunk], tile_peak = kMasked;
    for (uint i = 0; i < kChunk; i++) {
      weight[i] = tile + part * kChunk + i < visible ? own[i] * args.scale : kMasked;
      tile_peak = max(tile_peak, weight[i]);
    }
    const float new_peak = max(peak, quad_max(tile_peak)); // finite from the first tile on: every row sees key 0
    const float rescale = fast::exp(peak - new_peak);
    for (uint i = 0; i < kChunk; i++) weight[i] = fast::exp(weight[i] - new_peak);
    sum = sum * rescale + sum_chunk(weight);
    for (uint i = 0; i < kChunk; i++) own[i] = weight[i];
    if (part == 0) diagonal[row * kTile + row] = rescale;
    const bool moved = simd_any(tile > 0 && new_peak != peak);
    peak = new_peak;
    simdgroup_barrier(mem_flags::mem_threadgroup);

    if (moved) {
      simdgroup_float8x8 factor;
      simdgroup_load(factor, diagonal, kTile);
      #pragma clang loop unroll(full)
      for (uint d = 0; d < tiles; d++) {
        simdgroup_float8x8 scaled;
        simdgroup_multiply(scaled, factor, output[d]);
        output[d] = scaled;
      }
    }
    for (uint g = 0; g < groups; g++) {
      simdgroup_float8x8 probability;
      simdgroup_load(probability, scores + g * kTile, kKeys);
      device const bfloat* rows = values + ulong(g * kTile) * kv_stride;
      if (whole) {
        #pragma clang loop unroll(full)
        for (uint d = 0; d < tiles; d++) {
          simdgroup_bfloat8x8 value;
          simdgroup_load(value, rows + d * kTile, kv_stride);
          simdgroup_multiply_accumulate(output[d], probability, value, output[d]);
        }
      } else {
        const uint live = min(kTile, total - tile - g * kTile);
        #pragma clang loop unroll(full)
        for (uint slab = 0; slab < tiles; slab += kGroups) {
          stage_rows(stage, rows + slab * kTile, kv_stride, live, lane);
          #pragma clang loop unroll(full)
          for (uint j = 0; j < kGroups; j++) {
            simdgroup_bfloat8x8 value;
            simdgroup_load(value, stage + j * kTile, kKeys);
            simdgroup_multiply_accumulate(output[slab + j], probability, value, output[slab + j]);
          }
        }
      }
    }
  }

  const float normalise = 1.0f / quad_sum(sum);
  #pragma clang loop unroll(full)
  for (uint slab = 0; slab < tiles; slab += kGroups) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    #pragma clang loop unroll(full)
    for (uint j = 0; j < kGroups; j++) simdgroup_store(output[slab + j], scores + j * kTile, kKeys);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float value[kChunk];
    for (uint i = 0; i < kChunk; i++) value[i] = scores[row * kKeys + part * kChunk + i] * normalise;
    if (row < live_rows) store_chunk(out + ulong(row) * q_stride + slab * kTile + part * kChunk, value);
  }
}
