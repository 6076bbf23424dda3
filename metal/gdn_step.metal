// A decode step of Gated DeltaNet between its projections as one launch. Equations as in gdn.metal; q, k, gates and sums stay
// f32 from the projection's output to the mixer's.
#include "common.h"
#include "lanes.h"

constant constexpr uint kPairColumns = 2;                       // state columns of a quad at a time
constant constexpr uint kSimdgroupColumns = kPairColumns * kQuads;
constant constexpr uint kMaxValueDim = 256;                     // dv; checked by the host
constant constexpr uint kStepThreads = 128;
constant constexpr uint kScanNormThreads = 256;

// What a step needs to know about its head besides the vectors. The vectors may be unnormalised: their norms enter with the sums.
struct HeadScalars {
  float decay, beta, query_scale, key_scale, key_query;         // key_query: of the vectors as they are
};

// Two neighbouring state columns (value indices), dk numbers each, in the registers of a quad.
template <uint DK>
struct ColumnPair {
  float value[kPairColumns][DK / (kQuad * kChunk)][kChunk];
};

template <uint DK>
METAL_FUNC void load_pair(thread ColumnPair<DK>& pair, device const float* state, uint part) {
  for (uint c = 0; c < kPairColumns; c++)
    for (uint s = 0; s < DK / (kQuad * kChunk); s++) load_chunk(state + c * DK + (s * kQuad + part) * kChunk, pair.value[c][s]);
}

template <uint DK>
METAL_FUNC void store_pair(thread const ColumnPair<DK>& pair, device float* state, uint part) {
  for (uint c = 0; c < kPairColumns; c++)
    for (uint s = 0; s < DK / (kQuad * kChunk); s++) store_chunk(state + c * DK + (s * kQuad + part) * kChunk, pair.value[c][s]);
}

// S <- g S; delta = beta (v - S k); S <- S + delta k^T; returns S q. As in gdn_scan both products use the old state, so that
// the two columns need one exchange, of four sums.
template <uint DK>
METAL_FUNC float2 advance_pair(thread ColumnPair<DK>& pair, threadgroup const float* query, threadgroup const float* key, float2 v,
                               thread const HeadScalars& head, uint part) {
  float sk[kPairColumns][kChunk] = {{0.0f}}, sq[kPairColumns][kChunk] = {{0.0f}};
  for (uint s = 0; s < DK / (kQuad * kChunk); s++) {
    const uint at = (s * kQuad + part) * kChunk;
    for (uint c = 0; c < kPairColumns; c++)
      for (uint i = 0; i < kChunk; i++) {
        sk[c][i] = fma(pair.value[c][s][i], key[at + i], sk[c][i]);
        sq[c][i] = fma(pair.value[c][s][i], query[at + i], sq[c][i]);
      }
  }
  const float4 sums = quad_sum(float4(sum_chunk(sk[0]), sum_chunk(sk[1]), sum_chunk(sq[0]), sum_chunk(sq[1])));
  const float2 delta = head.beta * (v - head.decay * head.key_scale * sums.xy), step = head.key_scale * delta;
  for (uint s = 0; s < DK / (kQuad * kChunk); s++) {
    const uint at = (s * kQuad + part) * kChunk;
    for (uint c = 0; c < kPairColumns; c++)
      for (uint i = 0; i < kChunk; i++) pair.value[c][s][i] = fma(step[c], key[at + i], head.decay * pair.value[c][s][i]);
  }
  return head.query_scale * (head.decay * sums.zw + head.key_query * step);
}

METAL_FUNC float softplus(float x) {
  const float e = precise::exp(-abs(x));
  // log(1 + e) loses e's low bits; below 0.01 three terms of the series are exact to float.
  return max(x, 0.0f) + (e < 0.01f ? e * (1.0f - e * (0.5f - e * 0.33333333f)) : precise::log(1.0f + e));
}

// silu of the convolution of eight neighbouring channels. With `keep` their window moves on into the next ring slot.
struct StepConvolution {
  device const bfloat* proj;
  device const float* w;
  device const bfloat* before;       // [taps - 1, channels]
  device bfloat* after;
  uint taps, channels;

  METAL_FUNC void run(uint channel, bool keep, thread float* y) const {
    for (uint i = 0; i < kChunk; i++) y[i] = 0.0f;
    if (taps == 4) {                 // the model's: all loads at once, the weights of a channel in one
      float window[4][kChunk];
      for (uint j = 0; j < 4; j++) load_chunk(j + 1 < 4 ? before + j * channels + channel : proj + channel, window[j]);
      for (uint i = 0; i < kChunk; i++) {
        const float4 tap = ((device const float4*)w)[channel + i];
        y[i] = silu(fma(tap.w, window[3][i], fma(tap.z, window[2][i], fma(tap.y, window[1][i], tap.x * window[0][i]))));
      }
      if (keep)
        for (uint j = 1; j < 4; j++) store_chunk(after + (j - 1) * channels + channel, window[j]);
      return;
    }
    float x[kChunk];
    for (uint j = 0; j < taps; j++) {
      load_chunk(j + 1 < taps ? before + j * channels + channel : proj + channel, x);
      if (keep && j > 0) store_chunk(after + (j - 1) * channels + channel, x);
      for (uint i = 0; i < kChunk; i++) y[i] = fma(w[(channel + i) * taps + j], x[i], y[i]);
    }
    for (uint i = 0; i < kChunk; i++) y[i] = silu(y[i]);
  }
};

// Between a GDN layer's projections in decode: convolution with its window, q/k norm, gates and recurrence, for one value head and
// a block of its columns. grid = (column blocks, v_heads), 16 columns or a multiple per threadgroup: 32 fill a GPU (128
// threadgroups at the 35B's dims, which one per head would not), so q and k are convolved again in each; their windows are written
// by the first threadgroup of the first value head that shares them. The state's loads are on their way meanwhile.
template <uint DK>
[[kernel, max_total_threads_per_threadgroup(kStepThreads)]] void gdn_step(
    device const bfloat* proj [[buffer(0)]],       // q | k | v | ...
    device const float* w [[buffer(1)]],           // [channels, taps]
    device bfloat* conv_ring [[buffer(2)]],        // [slots][taps - 1, channels]
    device const float* A_log [[buffer(3)]],       // [v_heads]
    device const float* dt_bias [[buffer(4)]],     // [v_heads]
    device float* state_ring [[buffer(5)]],        // [slots][v_heads, dv, dk]
    device bfloat* out [[buffer(6)]],              // [v_heads * dv]
    device const StepState& step [[buffer(7)]],
    constant GdnStepArgs& args [[buffer(8)]],
    device const bfloat* gates [[buffer(9)]],      // b at b_offset, a at a_offset: proj again, or a buffer of their own
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  constexpr uint kKeyChunks = DK / kChunk;
  threadgroup float query[DK], key[DK], value[kMaxValueDim];
  threadgroup float2 decay_beta;
  const uint head = group.y, shared_by = args.v_heads / args.k_heads, key_head = head / shared_by;
  const uint columns = args.dv / groups.x, first = group.x * columns;
  const uint part = thread_id % kQuad, stride = threads.x / 32 * kSimdgroupColumns;
  uint column = first + thread_id / kQuad * kPairColumns;
  const ulong state = ulong(head) * args.dv * DK;
  const uint next = (step.slot + 1) % LILY_RING_SLOTS;
  const bool running = step.done == LILY_RUNNING;
  device const float* before = state_ring + ulong(step.slot) * args.state_stride + state;
  device float* after = state_ring + ulong(next) * args.state_stride + state;

  ColumnPair<DK> pair;
  if (column < first + columns) load_pair(pair, before + column * DK, part);

  const uint key_width = args.k_heads * DK, channels = 2 * key_width + args.v_heads * args.dv;
  const StepConvolution convolution{proj, w, conv_ring + ulong(step.slot) * args.conv_stride, conv_ring + ulong(next) * args.conv_stride, args.taps, channels};
  const uint value_chunks = columns / kChunk;
  // One chunk a task: q and k fill a simdgroup, values and gates the next.
  for (uint task = thread_id; task <= 2 * kKeyChunks + value_chunks; task += threads.x) {
    if (task < 2 * kKeyChunks) {
      const bool keep = running && group.x == 0 && head % shared_by == 0, is_key = task >= kKeyChunks;
      const uint at = task % kKeyChunks * kChunk;
      float x[kChunk];
      convolution.run((is_key ? key_width : 0) + key_head * DK + at, keep, x);
      threadgroup float* to = (is_key ? key : query) + at;
      for (uint i = 0; i < kChunk; i++) to[i] = x[i];
    } else if (task < 2 * kKeyChunks + value_chunks) {
      const uint at = (task - 2 * kKeyChunks) * kChunk;
      float v[kChunk];
      convolution.run(2 * key_width + head * args.dv + first + at, running, v);
      for (uint i = 0; i < kChunk; i++) value[at + i] = v[i];
    } else {
      const float dt = softplus(float(gates[args.a_offset + head]) + dt_bias[head]);
      decay_beta = float2(precise::exp(-precise::exp(A_log[head]) * dt), sigmoid(float(gates[args.b_offset + head])));
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float4 sums = 0.0f;                              // q q, k k, q k
  for (uint i = thread_id % 32; i < DK; i += 32) sums += float4(query[i] * query[i], key[i] * key[i], query[i] * key[i], 0.0f);
  sums = simd_sum(sums);
  const HeadScalars scalars{decay_beta.x, decay_beta.y, fast::rsqrt(sums.x + 1e-6f) * fast::rsqrt(float(DK)), fast::rsqrt(sums.y + 1e-6f), sums.z};
  while (column < first + columns) {               // the same for all of a simdgroup
    const float2 v = float2(value[column - first], value[column - first + 1]);
    const float2 o = advance_pair(pair, query, key, v, scalars, part);
    if (part == 0) *(device bfloat2*)(out + head * args.dv + column) = bfloat2(o);
    if (running) store_pair(pair, after + column * DK, part);
    column += stride;
    if (column < first + columns) load_pair(pair, before + column * DK, part);
  }
}

// The article's chain (D4), kept as a switch: recurrence and gated norm of one token, one threadgroup per value head. It
// saves a launch more than gdn_scan does, but 32 threadgroups are too few for a large GPU.
template <uint DK>
[[kernel, max_total_threads_per_threadgroup(kScanNormThreads)]] void gdn_scan_norm(
    device const bfloat* c [[buffer(0)]],          // q | k | v: convolved, q and k normalised
    device const float* decay [[buffer(1)]],       // [v_heads]
    device const float* beta [[buffer(2)]],        // [v_heads]
    device float* ring [[buffer(3)]],              // [slots][v_heads, dv, dk]
    device bfloat* out [[buffer(4)]],              // [v_heads * dv]
    device const StepState& step [[buffer(5)]],
    constant ScanNormArgs& args [[buffer(6)]],
    device const bfloat* z [[buffer(7)]],          // [v_heads * dv]
    device const float* weight [[buffer(8)]],      // [dv]
    uint head [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  constexpr uint kKeyChunks = DK / kChunk;
  threadgroup float query[DK], key[DK], o[kMaxValueDim], products[kKeyChunks];
  const uint key_width = args.k_heads * DK, key_head = head / (args.v_heads / args.k_heads);
  device const bfloat* v = c + 2 * key_width + head * args.dv;
  for (uint chunk = thread_id; chunk < kKeyChunks; chunk += threads) {
    float q[kChunk], k[kChunk], qk[kChunk];
    load_chunk(c + key_head * DK + chunk * kChunk, q);
    load_chunk(c + key_width + key_head * DK + chunk * kChunk, k);
    for (uint i = 0; i < kChunk; i++) {
      query[chunk * kChunk + i] = q[i];
      key[chunk * kChunk + i] = k[i];
      qk[i] = q[i] * k[i];
    }
    products[chunk] = sum_chunk(qk);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  HeadScalars scalars{decay[head], beta[head], 1.0f, 1.0f, 0.0f};
  for (uint i = 0; i < kKeyChunks; i++) scalars.key_query += products[i];
  const ulong state = ulong(head) * args.dv * DK;
  device const float* before = ring + ulong(step.slot) * args.ring_stride + state;
  device float* after = ring + ulong((step.slot + 1) % LILY_RING_SLOTS) * args.ring_stride + state;
  const uint part = thread_id % kQuad;
  for (uint column = thread_id / kQuad * kPairColumns; column < args.dv; column += threads / 32 * kSimdgroupColumns) {
    ColumnPair<DK> pair;
    load_pair(pair, before + column * DK, part);
    const float2 result = advance_pair(pair, query, key, float2(float(v[column]), float(v[column + 1])), scalars, part);
    if (part == 0) {
      o[column] = result.x;
      o[column + 1] = result.y;
    }
    if (step.done == LILY_RUNNING) store_pair(pair, after + column * DK, part);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint column = thread_id * kChunk; column < args.dv; column += threads * kChunk) {
    float square[kChunk] = {0.0f};
    for (uint at = 0; at < args.dv; at += kChunk)
      for (uint i = 0; i < kChunk; i++) square[i] = fma(o[at + i], o[at + i], square[i]);
    const float scale = fast::rsqrt(sum_chunk(square) / float(args.dv) + args.eps);
    float gate[kChunk], g[kChunk];
    load_chunk(z + head * args.dv + column, gate);
    load_chunk(weight + column, g);
    for (uint i = 0; i < kChunk; i++) gate[i] = o[column + i] * scale * g[i] * silu(gate[i]);
    store_chunk(out + head * args.dv + column, gate);
  }
}

#define INSTANTIATE(name, kernel_function, dk) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<dk>) kernel_function<dk>;
INSTANTIATE("gdn_step_d64", gdn_step, 64)
INSTANTIATE("gdn_step_d128", gdn_step, 128)
INSTANTIATE("gdn_scan_norm_d64", gdn_scan_norm, 64)
INSTANTIATE("gdn_scan_norm_d128", gdn_scan_norm, 128)
