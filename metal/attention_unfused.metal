// The control of D4's query and key chain: what attn_prepare does in one launch, as four that each read what the one before wrote.
// All take AttnPrepareArgs. A quad of lanes per head of a row; grid = (ceil(rows * heads * 4 / threads)).
#include "common.h"
#include "lanes.h"
#include "rope.h"

// The row and head of a quad's item among `heads` per row.
struct Item {
  bool live;
  uint row, head, part;
};

METAL_FUNC Item item_of(uint thread_index, uint rows, uint heads) {
  const uint item = thread_index / kQuad;
  Item result;
  result.live = item < rows * heads;
  result.row = result.live ? item / heads : 0;
  result.head = result.live ? item % heads : 0;
  result.part = thread_index % kQuad;
  return result;
}

METAL_FUNC void copy_head(device const bfloat* from, device bfloat* to, uint dim, uint part) {
  for (uint d = part * kChunk; d < dim; d += kQuad * kChunk) *(device BfloatChunk*)(to + d) = *(device const BfloatChunk*)(from + d);
}

// First: queries without their gates, and keys, into rows of their own. heads = q_heads + kv_heads.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_split(
    device const bfloat* proj [[buffer(0)]],     // [rows, ldp]: per query head [query | gate], keys, values
    device bfloat* q [[buffer(1)]],              // [rows, q_heads * head_dim]
    device bfloat* k [[buffer(2)]],              // [rows, kv_heads * head_dim]
    constant AttnPrepareArgs& args [[buffer(3)]],
    uint thread_index [[thread_position_in_grid]]) {
  const Item item = item_of(thread_index, args.rows, args.q_heads + args.kv_heads);
  if (!item.live) return;
  const uint dim = args.head_dim;
  const bool is_query = item.head < args.q_heads;
  const uint key_head = is_query ? 0 : item.head - args.q_heads;
  copy_head(proj + ulong(item.row) * args.ldp + (is_query ? item.head * 2 * dim : args.k_offset + key_head * dim),
            is_query ? q + (ulong(item.row) * args.q_heads + item.head) * dim : k + (ulong(item.row) * args.kv_heads + key_head) * dim, dim, item.part);
}

// Second: RMSNorm of each head, in place. heads = q_heads + kv_heads.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_qk_norm(
    device bfloat* q [[buffer(0)]],
    device bfloat* k [[buffer(1)]],
    device const float* q_norm [[buffer(2)]],    // [head_dim]
    device const float* k_norm [[buffer(3)]],    // [head_dim]
    constant AttnPrepareArgs& args [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]]) {
  const Item item = item_of(thread_index, args.rows, args.q_heads + args.kv_heads);
  const bool is_query = item.head < args.q_heads;
  device bfloat* x = is_query ? q + (ulong(item.row) * args.q_heads + item.head) * args.head_dim
                              : k + (ulong(item.row) * args.kv_heads + item.head - args.q_heads) * args.head_dim;
  const uint dim = item.live ? args.head_dim : 0;            // idle quads still take part in the exchange
  float square[kChunk] = {0.0f};
  for (uint d = item.part * kChunk; d < dim; d += kQuad * kChunk) {
    float value[kChunk];
    load_chunk(x + d, value);
    for (uint i = 0; i < kChunk; i++) square[i] = fma(value[i], value[i], square[i]);
  }
  const float scale = precise::rsqrt(quad_sum(sum_chunk(square)) / float(args.head_dim) + args.eps);
  device const float* norm = is_query ? q_norm : k_norm;
  for (uint d = item.part * kChunk; d < dim; d += kQuad * kChunk) {
    float value[kChunk], weight[kChunk];
    load_chunk(x + d, value);
    load_chunk(norm + d, weight);
    for (uint i = 0; i < kChunk; i++) value[i] = value[i] * scale * weight[i];
    store_chunk(x + d, value);
  }
}

// Third: RoPE in place. A thread per pair: grid = (ceil(rows * (q_heads + kv_heads) * rotary_dim / 2 / threads)).
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_rope(
    device bfloat* q [[buffer(0)]],
    device bfloat* k [[buffer(1)]],
    device const float2* rope_lo [[buffer(2)]],  // as for attn_prepare
    device const float2* rope_hi [[buffer(3)]],
    device const StepState& step [[buffer(4)]],
    constant AttnPrepareArgs& args [[buffer(5)]],
    uint thread_index [[thread_position_in_grid]]) {
  const uint half_rotary = args.rotary_dim / 2, heads = args.q_heads + args.kv_heads;
  const uint item = thread_index / half_rotary, pair = thread_index % half_rotary;
  if (item >= args.rows * heads) return;
  const uint row = item / heads, head = item % heads;
  device bfloat* x = head < args.q_heads ? q + (ulong(row) * args.q_heads + head) * args.head_dim
                                         : k + (ulong(row) * args.kv_heads + head - args.q_heads) * args.head_dim;
  const float2 turn = rope_turn(rope_lo, rope_hi, step.position + row, pair, args);
  const float a = float(x[pair]), b = float(x[pair + half_rotary]);
  x[pair] = bfloat(a * turn.x - b * turn.y);
  x[pair + half_rotary] = bfloat(a * turn.y + b * turn.x);
}

// Last: keys and values into the cache, unless the generation has stopped. heads = 2 * kv_heads.
[[kernel, max_total_threads_per_threadgroup(256)]] void attn_cache_write(
    device const bfloat* k [[buffer(0)]],        // [rows, kv_heads * head_dim]
    device const bfloat* proj [[buffer(1)]],     // values at v_offset
    device bfloat* k_cache [[buffer(2)]],        // [capacity, kv_heads * head_dim]
    device bfloat* v_cache [[buffer(3)]],
    device const StepState& step [[buffer(4)]],
    constant AttnPrepareArgs& args [[buffer(5)]],
    uint thread_index [[thread_position_in_grid]]) {
  const Item item = item_of(thread_index, args.rows, 2 * args.kv_heads);
  if (!item.live || step.done != LILY_RUNNING) return;
  const uint dim = args.head_dim, head = item.head % args.kv_heads;
  const bool is_key = item.head < args.kv_heads;
  const ulong target = (ulong(step.position + item.row) * args.kv_heads + head) * dim;
  copy_head(is_key ? k + (ulong(item.row) * args.kv_heads + head) * dim : proj + ulong(item.row) * args.ldp + args.v_offset + head * dim,
            (is_key ? k_cache : v_cache) + target, dim, item.part);
}
