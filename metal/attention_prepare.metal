// Full attention, from the projections to queries and KV cache.
#include "common.h"
#include "lanes.h"
#include "rope.h"

// Lanes per head of a row: a quad, or where the host says so (policy.py, Tuning.head_lanes) a simdgroup, for a GPU whose lanes wait
// long for each chunk.
constant bool kWideSwitch [[function_constant(5)]];
METAL_FUNC uint head_lanes() { return is_function_constant_defined(kWideSwitch) && kWideSwitch ? 32 : kQuad; }

// D4: per-head RMSNorm, RoPE, split and cache write in one kernel, called after the q/k/v projections of a pass. Items are the heads
// of a row: query heads first, then key and value heads. Row r is position step.position + r.
// RoPE turns the pair (i, i + rotary / 2) of the first rotary_dim values.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_prepare(
    device const bfloat* proj [[buffer(0)]],     // [rows, ldp]: per query head [query | gate], keys, values
    device const float* q_norm [[buffer(1)]],    // [head_dim]
    device const float* k_norm [[buffer(2)]],    // [head_dim]
    device const float2* rope_lo [[buffer(3)]],  // [rope_lo_rows, rotary_dim / 2] (cos, sin) of (p % rope_lo_rows) * inv_freq
    device const float2* rope_hi [[buffer(4)]],  // [.., rotary_dim / 2] of (p / rope_lo_rows) * rope_lo_rows * inv_freq
    device bfloat* q_out [[buffer(5)]],          // [rows, q_heads * head_dim]
    device bfloat* k_cache [[buffer(6)]],        // [capacity, kv_heads * head_dim]
    device bfloat* v_cache [[buffer(7)]],
    device const StepState& step [[buffer(8)]],
    constant AttnPrepareArgs& args [[buffer(9)]],
    uint thread_index [[thread_position_in_grid]]) {
  const uint lanes = head_lanes(), item = thread_index / lanes, part = thread_index % lanes;
  const uint heads = args.q_heads + 2 * args.kv_heads, dim = args.head_dim;
  const bool live = item < args.rows * heads;      // idle lanes still take part in the exchange
  const uint row = live ? item / heads : 0, head = live ? item % heads : 0, position = step.position + row;
  const bool is_query = head < args.q_heads, is_key = !is_query && head < args.q_heads + args.kv_heads;
  const uint kv_head = is_query ? 0 : (head - args.q_heads) % args.kv_heads;
  device const bfloat* source = proj + ulong(row) * args.ldp
      + (is_query ? head * 2 * dim : (is_key ? args.k_offset : args.v_offset) + kv_head * dim);
  device bfloat* target = is_query ? q_out + (ulong(row) * args.q_heads + head) * dim
      : (is_key ? k_cache : v_cache) + (ulong(position) * args.kv_heads + kv_head) * dim;
  const bool writes = live && (is_query || step.done == LILY_RUNNING);   // a stopped step leaves the cache alone
  const uint end = live ? dim : 0;

  float square[kChunk] = {0.0f};
  for (uint d = part * kChunk; d < end; d += lanes * kChunk) {
    float value[kChunk];
    load_chunk(source + d, value);
    for (uint i = 0; i < kChunk; i++) square[i] = fma(value[i], value[i], square[i]);
  }
  const float mean = (lanes == 32 ? simd_sum(sum_chunk(square)) : quad_sum(sum_chunk(square))) / float(dim);
  if (!writes) return;
  const bool is_value = !is_query && !is_key;
  const float scale = is_value ? 1.0f : fast::rsqrt(mean + args.eps);
  device const float* norm = is_query ? q_norm : k_norm;
  const uint rotary = is_value ? 0 : args.rotary_dim, half_rotary = args.rotary_dim / 2;

  for (uint d = part * kChunk; d < dim; d += lanes * kChunk) {
    float value[kChunk], weight[kChunk];
    load_chunk(source + d, value);
    if (!is_value) {
      load_chunk(norm + d, weight);
      for (uint i = 0; i < kChunk; i++) value[i] = value[i] * scale * weight[i];
    }
    if (d < rotary && args.rotary_dim % (2 * kChunk) == 0) {         // the model's: a chunk and its partner lie in one half each, loads go together
      const bool low = d < half_rotary;
      const uint other = low ? d + half_rotary : d - half_rotary, pair = low ? d : other;
      float partner[kChunk], partner_weight[kChunk];
      load_chunk(source + other, partner);
      load_chunk(norm + other, partner_weight);
      float2 turn[kChunk];
      for (uint i = 0; i < kChunk; i++) turn[i] = rope_turn(rope_lo, rope_hi, position, pair + i, args);
      for (uint i = 0; i < kChunk; i++) {
        const float turned = partner[i] * scale * partner_weight[i];
        value[i] = value[i] * turn[i].x + (low ? -turned : turned) * turn[i].y;
      }
    } else if (d < rotary) {
      // The partner comes from memory again rather than from its lane: no exchange, and it is in cache.
      for (uint i = 0; i < kChunk; i++) {
        const uint e = d + i, pair = e < half_rotary ? e : e - half_rotary;
        if (e >= rotary) break;
        const uint other = e < half_rotary ? e + half_rotary : pair;
        const float partner = float(source[other]) * scale * norm[other];
        const float2 turn = rope_turn(rope_lo, rope_hi, position, pair, args);
        value[i] = value[i] * turn.x + (e < half_rotary ? -partner : partner) * turn.y;
      }
    }
    store_chunk(target + d, value);
  }
}
