// Gated DeltaNet around its projections: convolution, q/k norm, gates, the recurrence, gated norm.
// Equations: docs/model.md. Conv and recurrent state live in rings of LILY_RING_SLOTS: a pass reads
// slot s and writes slot s + 1, so steps that ran ahead of a stop can be taken back, and a program never changes.
// Only real rows exist here: no tile padding ever reaches the state.
#include "common.h"
#include "lanes.h"

constant constexpr uint kConvRows = 32;        // rows per threadgroup: how far a window slides (host: plans)
constant constexpr uint kMaxTaps = 8;

// One thread's window of TAPS rows x 8 channels slides over its rows, so every input is read once. Fewer than TAPS taps:
// the oldest weights are zero and their rows are not read.
template <uint TAPS>
METAL_FUNC void convolve(
    device const bfloat* proj, device const float* w, device const bfloat* window_rows, device bfloat* out,
    constant ConvArgs& args, uint channel, uint first_row, uint end_row) {
  const uint skip = TAPS - args.taps;
  float weight[TAPS][kChunk], window[TAPS][kChunk];
  #pragma unroll
  for (uint j = 0; j < TAPS; j++)
    for (uint i = 0; i < kChunk; i++) weight[j][i] = j < skip ? 0.0f : w[(channel + i) * args.taps + j - skip];
  // Row first_row - 1 - k, from the carried rows when it lies before this pass.
  #pragma unroll
  for (uint j = 1; j < TAPS; j++) {
    const int row = int(first_row + j) - int(TAPS);
    if (j <= skip) for (uint i = 0; i < kChunk; i++) window[j][i] = 0.0f;
    else if (row >= 0) load_chunk(proj + ulong(row) * args.ldp + channel, window[j]);
    else load_chunk(window_rows + uint(row + int(args.taps) - 1) * args.channels + channel, window[j]);
  }
  for (uint row = first_row; row < end_row; row++) {
    #pragma unroll
    for (uint j = 0; j + 1 < TAPS; j++)
      for (uint i = 0; i < kChunk; i++) window[j][i] = window[j + 1][i];
    load_chunk(proj + ulong(row) * args.ldp + channel, window[TAPS - 1]);
    float sum[kChunk] = {0.0f};
    #pragma unroll
    for (uint j = 0; j < TAPS; j++)
      for (uint i = 0; i < kChunk; i++) sum[i] = fma(weight[j][i], window[j][i], sum[i]);
    for (uint i = 0; i < kChunk; i++) sum[i] = silu(sum[i]);
    store_chunk(out + ulong(row) * args.channels + channel, sum);
  }
}

// Called after a GDN layer's projections. y_t = silu(sum_j w[c, j] x[t - taps + 1 + j]); rows before this pass come from the
// ring, and the last taps - 1 rows go to the next slot, old ones moving up when the pass is shorter than the window.
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_conv_silu(
    device const bfloat* proj [[buffer(0)]],   // [rows, ldp], columns 0..channels
    device const float* w [[buffer(1)]],       // [channels, taps]
    device bfloat* ring [[buffer(2)]],         // [slots][taps - 1, channels]
    device bfloat* out [[buffer(3)]],          // [rows, channels]
    device const StepState& step [[buffer(4)]],
    constant ConvArgs& args [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint2 thread_position [[thread_position_in_grid]]) {
  const uint channel = thread_position.x * kChunk, first_row = group.y * kConvRows;
  if (channel >= args.channels) return;
  device const bfloat* before = ring + ulong(step.slot) * args.ring_stride;
  const uint end_row = min(first_row + kConvRows, args.rows);
  if (args.taps == 4) convolve<4>(proj, w, before, out, args, channel, first_row, end_row);
  else convolve<kMaxTaps>(proj, w, before, out, args, channel, first_row, end_row);

  if (group.y != 0 || step.done != LILY_RUNNING) return;
  device bfloat* after = ring + ulong((step.slot + 1) % LILY_RING_SLOTS) * args.ring_stride;
  const uint kept = args.taps - 1;
  for (uint j = 0; j < kept; j++) {
    const int row = int(args.rows + j) - int(kept);
    float value[kChunk];
    if (row >= 0) load_chunk(proj + ulong(row) * args.ldp + channel, value);
    else load_chunk(before + uint(row + int(kept)) * args.channels + channel, value);
    store_chunk(after + j * args.channels + channel, value);
  }
}

// Called between convolution and recurrence: q <- q / |q| / sqrt(dk), k <- k / |k| in place, one quad per head.
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_qk_norm(
    device bfloat* c [[buffer(0)]],            // [rows, ldc]: q heads, then k heads
    constant QkNormArgs& args [[buffer(1)]],
    uint thread_index [[thread_position_in_grid]]) {
  const uint item = thread_index / kQuad, part = thread_index % kQuad, heads = 2 * args.heads;
  const bool live = item < args.rows * heads;
  const uint row = item / heads, head = item % heads;
  device bfloat* x = c + (live ? ulong(row) * args.ldc + head * args.head_dim : 0);
  const uint n = live ? args.head_dim : 0;   // idle quads still take part in the exchange
  float square[kChunk] = {0.0f};
  for (uint d = part * kChunk; d < n; d += kQuad * kChunk) {
    float value[kChunk];
    load_chunk(x + d, value);
    for (uint i = 0; i < kChunk; i++) square[i] = fma(value[i], value[i], square[i]);
  }
  float scale = precise::rsqrt(quad_sum(sum_chunk(square)) + 1e-6f);
  if (head < args.heads) scale *= precise::rsqrt(float(args.head_dim));
  for (uint d = part * kChunk; d < n; d += kQuad * kChunk) {
    float value[kChunk];
    load_chunk(x + d, value);
    for (uint i = 0; i < kChunk; i++) value[i] *= scale;
    store_chunk(x + d, value);
  }
}

METAL_FUNC float softplus(float x) {
  const float e = precise::exp(-abs(x));
  // log(1 + e) loses e's low bits; below 0.01 three terms of the series are exact to float.
  return max(x, 0.0f) + (e < 0.01f ? e * (1.0f - e * (0.5f - e * 0.33333333f)) : precise::log(1.0f + e));
}

// Called beside the convolution: beta = sigmoid(b), decay = exp(-exp(A_log) softplus(a + dt_bias)), both kept in f32
// (P4: a rounded decay compounds over a long context).
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_gates(
    device const bfloat* b [[buffer(0)]],      // [rows, ldb]
    device const bfloat* a [[buffer(1)]],      // [rows, lda]
    device const float* A_log [[buffer(2)]],   // [heads]
    device const float* dt_bias [[buffer(3)]], // [heads]
    device float* beta [[buffer(4)]],          // [rows, heads]
    device float* decay [[buffer(5)]],         // [rows, heads]
    constant GatesArgs& args [[buffer(6)]],
    uint index [[thread_position_in_grid]]) {
  if (index >= args.rows * args.heads) return;
  const uint row = index / args.heads, head = index % args.heads;
  beta[index] = sigmoid(float(b[ulong(row) * args.ldb + head]));
  const float dt = softplus(float(a[ulong(row) * args.lda + head]) + dt_bias[head]);
  decay[index] = precise::exp(-precise::exp(A_log[head]) * dt);
}

// Called for the recurrence of a pass, prefill and decode alike (P4): S <- g S; delta = beta (v - S k); S <- S + delta k^T;
// o = S q. A state column (one value index, dk numbers) stays in the registers of a quad from the first row to the last and
// is written once; a simdgroup carries 8 columns. Both products use the old state, S k and S q, with o = g (S q) +
// delta (k q), so that a row costs one exchange of three sums instead of two dependent ones.
template <uint DK>
METAL_FUNC void scan_columns(
    device const bfloat* c, device const float* decay, device const float* beta, device float* ring, device bfloat* out,
    device const StepState& step, constant ScanArgs& args, uint column, uint head, uint part) {
  constexpr uint kSteps = DK / (kQuad * kChunk), kStride = kQuad * kChunk;
  const uint key_head = head / (args.v_heads / args.k_heads), width = args.k_heads * DK;
  device const bfloat* q = c + key_head * DK + part * kChunk;
  device const bfloat* k = q + width;
  device const bfloat* v = c + 2 * width + head * args.dv + column;
  const ulong offset = (ulong(head) * args.dv + column) * DK + part * kChunk;
  device const float* before = ring + ulong(step.slot) * args.ring_stride + offset;
  float state[kSteps][kChunk];
  #pragma unroll
  for (uint s = 0; s < kSteps; s++) load_chunk(before + s * kStride, state[s]);

  for (uint row = 0; row < args.rows; row++) {
    float key[kSteps][kChunk], sk[kChunk] = {0.0f}, sq[kChunk] = {0.0f}, kq[kChunk] = {0.0f};
    #pragma unroll
    for (uint s = 0; s < kSteps; s++) {
      float query[kChunk];
      load_chunk(k + s * kStride, key[s]);
      load_chunk(q + s * kStride, query);
      for (uint i = 0; i < kChunk; i++) {
        sk[i] = fma(state[s][i], key[s][i], sk[i]);
        sq[i] = fma(state[s][i], query[i], sq[i]);
        kq[i] = fma(key[s][i], query[i], kq[i]);
      }
    }
    const float4 sums = quad_sum(float4(sum_chunk(sk), sum_chunk(sq), sum_chunk(kq), 0.0f));
    const float g = decay[row * args.v_heads + head];
    const float delta = beta[row * args.v_heads + head] * (float(*v) - g * sums.x);
    #pragma unroll
    for (uint s = 0; s < kSteps; s++)
      for (uint i = 0; i < kChunk; i++) state[s][i] = fma(delta, key[s][i], g * state[s][i]);
    if (part == 0) out[(ulong(row) * args.v_heads + head) * args.dv + column] = bfloat(fma(delta, sums.z, g * sums.y));
    q += args.ldc;
    k += args.ldc;
    v += args.ldc;
  }

  if (step.done != LILY_RUNNING) return;
  device float* after = ring + ulong((step.slot + 1) % LILY_RING_SLOTS) * args.ring_stride + offset;
  #pragma unroll
  for (uint s = 0; s < kSteps; s++) store_chunk(after + s * kStride, state[s]);
}

template <uint DK>
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_scan(
    device const bfloat* c [[buffer(0)]],      // [rows, ldc]: q, k, v
    device const float* decay [[buffer(1)]],   // [rows, v_heads]
    device const float* beta [[buffer(2)]],    // [rows, v_heads]
    device float* ring [[buffer(3)]],          // [slots][v_heads, dv, dk]
    device bfloat* out [[buffer(4)]],          // [rows, v_heads * dv]
    device const StepState& step [[buffer(5)]],
    constant ScanArgs& args [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup_index [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint first = (group.x * simdgroups + simdgroup_index) * kQuads;
  if (first >= args.dv) return;              // dv is a multiple of 8: the whole simdgroup leaves
  scan_columns<DK>(c, decay, beta, ring, out, step, args, first + lane / kQuad, group.y, lane % kQuad);
}

#define INSTANTIATE_SCAN(DK)                                                                                        \
  template [[host_name("gdn_scan_d" #DK)]] [[kernel]] void gdn_scan<DK>(                                             \
      device const bfloat*, device const float*, device const float*, device float*, device bfloat*,                 \
      device const StepState&, constant ScanArgs&, uint2, uint, uint, uint);
INSTANTIATE_SCAN(64)
INSTANTIATE_SCAN(128)

// Called after the recurrence: RMSNorm of each head's output, times w, times silu(z). One quad per head.
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_gated_norm(
    device const bfloat* o [[buffer(0)]],      // [rows, heads * dv]
    device const bfloat* z [[buffer(1)]],      // [rows, ldz]
    device const float* w [[buffer(2)]],       // [dv]
    device bfloat* out [[buffer(3)]],          // [rows, heads * dv]
    constant GatedNormArgs& args [[buffer(4)]],
    uint thread_index [[thread_position_in_grid]]) {
  const uint item = thread_index / kQuad, part = thread_index % kQuad;
  const bool live = item < args.rows * args.heads;
  const uint n = live ? args.dv : 0, row = item / args.heads, head = item % args.heads;
  const ulong offset = live ? ulong(item) * args.dv : 0;
  z += live ? ulong(row) * args.ldz + head * args.dv : 0;
  float square[kChunk] = {0.0f};
  for (uint d = part * kChunk; d < n; d += kQuad * kChunk) {
    float value[kChunk];
    load_chunk(o + offset + d, value);
    for (uint i = 0; i < kChunk; i++) square[i] = fma(value[i], value[i], square[i]);
  }
  const float scale = precise::rsqrt(quad_sum(sum_chunk(square)) / float(args.dv) + args.eps);
  for (uint d = part * kChunk; d < n; d += kQuad * kChunk) {
    float value[kChunk], gate[kChunk], weight[kChunk];
    load_chunk(o + offset + d, value);
    load_chunk(z + d, gate);
    load_chunk(w + d, weight);
    for (uint i = 0; i < kChunk; i++) value[i] = value[i] * scale * weight[i] * silu(gate[i]);
    store_chunk(out + offset + d, value);
  }
}
