// The recurrence of Gated DeltaNet in chunks of 16 rows on matrix tiles (P4 beyond the scan), for prefill.
//
// Unrolled over a chunk that starts from state S (dv x dk), with D_ti = g_{i+1} .. g_t and G_t = g_1 .. g_t, the rule of gdn.metal is
//   u_t = beta_t (v_t - G_t S k_t - sum_{i<t} D_ti (k_t k_i) u_i)       o_t = G_t S q_t + sum_{i<=t} D_ti (q_t k_i) u_i
//   S'  = G_16 S + sum_i D_16,i u_i k_i^T
// so with A_ti = beta_t D_ti (k_t k_i) below the diagonal and T = (I + A)^-1 (the UT transform) everything is matrix products:
//   U = T diag(beta) V - T diag(beta G) (K S^T)     O = diag(G) (Q S^T) + (D . Q K^T) U     S'^T = G_16 S^T + K^T (diag(D_16) U)
// Only q, k and v are bf16, as they come; gates, decays, the triangular solve, U and the state are f32. Decays are products, never
// quotients or logarithms, so a gate of zero is as good as any.
#include "common.h"
#include "lanes.h"
#include <metal_simdgroup_matrix>

constant constexpr uint kMatrix = 8;                          // a simdgroup matrix is 8 x 8; a simdgroup owns 8 state columns
constant constexpr uint kRows = 16;                           // rows of a chunk
constant constexpr uint kParts = kRows / kMatrix;
constant constexpr uint kMaxSimdgroups = 8;
constant constexpr uint kValueStride = kMaxSimdgroups * kMatrix + 8;
constant constexpr uint kProducts = 6;                        // 8 x 8 blocks on and below the diagonal, of K K^T and of Q K^T

using FloatMatrix = simdgroup_matrix<float, 8, 8>;
using BfloatMatrix = simdgroup_matrix<bfloat, 8, 8>;

// What a chunk's threads share.
template <uint DK>
struct ChunkMemory {
  alignas(16) bfloat key[kRows * (DK + 8)];
  alignas(16) bfloat query[kRows * (DK + 8)];
  alignas(16) bfloat value[kRows * kValueStride];
  float products[2][kRows * kRows];                           // K K^T, then A; Q K^T, then D . Q K^T
  float from_value[kRows * kRows], from_state[kRows * kRows]; // T diag(beta), -T diag(beta G)
  float start[kParts][kMatrix * kMatrix];                     // diagonal: G_t
  float end[kParts][kMatrix * kMatrix];                       // diagonal: D_16,i
  float gate[kRows], beta[kRows];
  float out[kMaxSimdgroups][kRows * kMatrix];
};

// Rows of q, k and v; rows past `live` are zero, with gate 1 and beta 0, and change nothing.
template <uint DK>
METAL_FUNC void stage_chunk(threadgroup ChunkMemory<DK>& memory, device const bfloat* q, device const bfloat* k, device const bfloat* v,
                            device const float* decay, device const float* beta, uint ldc, uint heads, uint live, uint columns,
                            uint thread_id, uint threads) {
  const uint row_pieces = (2 * DK + columns) / kChunk;
  for (uint i = thread_id; i < kRows * row_pieces; i += threads) {
    const uint row = i / row_pieces, at = i % row_pieces * kChunk;
    device const bfloat* from = at < DK ? q + at : at < 2 * DK ? k + (at - DK) : v + (at - 2 * DK);
    threadgroup bfloat* to = at < DK ? memory.query + row * (DK + 8) + at
                           : at < 2 * DK ? memory.key + row * (DK + 8) + (at - DK) : memory.value + row * kValueStride + (at - 2 * DK);
    uint4 piece = uint4(0);
    if (row < live) piece = *(device const uint4*)(from + ulong(row) * ldc);
    *(threadgroup uint4*)to = piece;
  }
  for (uint row = thread_id; row < kRows; row += threads) {
    memory.gate[row] = row < live ? decay[row * heads] : 1.0f;
    memory.beta[row] = row < live ? beta[row * heads] : 0.0f;
  }
}

// Blocks of K K^T and Q K^T, shared out among the simdgroups.
template <uint DK>
METAL_FUNC void multiply_keys(threadgroup ChunkMemory<DK>& memory, uint simdgroup, uint simdgroups) {
  for (uint product = simdgroup; product < kProducts; product += simdgroups) {
    const uint block = product % 3, row = block > 0 ? kMatrix : 0, column = block > 1 ? kMatrix : 0;
    threadgroup const bfloat* left_rows = (product < 3 ? memory.key : memory.query) + row * (DK + 8);
    FloatMatrix sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint d = 0; d < DK; d += kMatrix) {
      BfloatMatrix left, right;
      simdgroup_load(left, left_rows + d, DK + 8);
      simdgroup_load(right, memory.key + column * (DK + 8) + d, DK + 8, ulong2(0), true);
      simdgroup_multiply_accumulate(sum, left, right, sum);
    }
    simdgroup_store(sum, memory.products[product / 3] + row * kRows + column, kRows);
  }
}

// Decays into the products, and the diagonal matrices.
template <uint DK>
METAL_FUNC void apply_decay(threadgroup ChunkMemory<DK>& memory, uint thread_id, uint threads) {
  for (uint entry = thread_id; entry < kRows * kRows; entry += threads) {
    const uint row = entry / kRows, column = entry % kRows;
    float between = 1.0f;
    for (uint i = column + 1; i <= row; i++) between *= memory.gate[i];
    memory.products[0][entry] = column < row ? memory.beta[row] * between * memory.products[0][entry] : 0.0f;
    memory.products[1][entry] = column <= row ? between * memory.products[1][entry] : 0.0f;
  }
  for (uint row = thread_id; row < kRows; row += threads) {
    float before = 1.0f, after = 1.0f;
    for (uint i = 0; i < kRows; i++) {
      if (i <= row) before *= memory.gate[i];
      else after *= memory.gate[i];
    }
    const uint diagonal = row % kMatrix * (kMatrix + 1);
    memory.start[row / kMatrix][diagonal] = before;
    memory.end[row / kMatrix][diagonal] = after;
  }
}

// T = (I + A)^-1 by forward substitution, a lane per column, and its two scaled forms.
template <uint DK>
METAL_FUNC void solve(threadgroup ChunkMemory<DK>& memory, uint lane) {
  if (lane >= kRows) return;
  const float beta = memory.beta[lane], start = memory.start[lane / kMatrix][lane % kMatrix * (kMatrix + 1)];
  float column[kRows];
  #pragma unroll
  for (uint row = 0; row < kRows; row++) {
    float sum = row == lane ? 1.0f : 0.0f;
    #pragma unroll
    for (uint i = 0; i < row; i++) sum = fma(-memory.products[0][row * kRows + i], column[i], sum);
    column[row] = sum;
    memory.from_value[row * kRows + lane] = sum * beta;
    memory.from_state[row * kRows + lane] = -sum * beta * start;
  }
}

// A simdgroup's 8 columns of the state over all rows of the pass: S^T stays in matrix registers and is written once. Shared work is
// done once per threadgroup, so more columns a threadgroup save work, and fewer fill more cores. grid = (dv / (8 simdgroups), v_heads).
template <uint DK>
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_chunk(
    device const bfloat* c [[buffer(0)]],      // [rows, ldc]: q, k, v
    device const float* decay [[buffer(1)]],   // [rows, v_heads]
    device const float* beta [[buffer(2)]],    // [rows, v_heads]
    device float* ring [[buffer(3)]],          // [slots][v_heads, dv, dk]
    device bfloat* out [[buffer(4)]],          // [rows, v_heads * dv]
    device const StepState& step [[buffer(5)]],
    constant ScanArgs& args [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ChunkMemory<DK> memory;
  const uint head = group.y, width = args.k_heads * DK, heads = args.v_heads;
  const uint first = group.x * simdgroups * kMatrix, column = first + simdgroup * kMatrix;
  const uint columns = min(args.dv - first, simdgroups * kMatrix);
  const bool live_columns = column < args.dv;                 // dv is a multiple of 8; a spare simdgroup only keeps the barriers
  device const bfloat* q = c + head / (heads / args.k_heads) * DK;
  device const bfloat* k = q + width;
  device const bfloat* v = c + 2 * width + head * args.dv + first;
  const ulong state_offset = (ulong(head) * args.dv + column) * DK;

  FloatMatrix state[DK / kMatrix];
  device const float* before = ring + ulong(step.slot) * args.ring_stride + state_offset;
  if (live_columns)
    #pragma unroll
    for (uint d = 0; d < DK / kMatrix; d++) simdgroup_load(state[d], before + d * kMatrix, DK, ulong2(0), true);
  for (uint i = thread_id; i < kParts * kMatrix * kMatrix; i += threads.x) memory.start[0][i] = memory.end[0][i] = 0.0f;

  for (uint row = 0; row < args.rows; row += kRows) {
    const uint live = min(kRows, args.rows - row);
    stage_chunk<DK>(memory, q + ulong(row) * args.ldc, k + ulong(row) * args.ldc, v + ulong(row) * args.ldc, decay + row * heads + head,
                    beta + row * heads + head, args.ldc, heads, live, columns, thread_id, threads.x);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    multiply_keys<DK>(memory, simdgroup, simdgroups);
    FloatMatrix key_state[kParts], query_state[kParts];       // K S^T, Q S^T
    if (live_columns) {
      #pragma unroll
      for (uint p = 0; p < kParts; p++) key_state[p] = query_state[p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      #pragma unroll
      for (uint d = 0; d < DK / kMatrix; d++)
        #pragma unroll
        for (uint p = 0; p < kParts; p++) {
          const uint at = p * kMatrix * (DK + 8) + d * kMatrix;
          BfloatMatrix left;
          simdgroup_load(left, memory.key + at, DK + 8);
          simdgroup_multiply_accumulate(key_state[p], left, state[d], key_state[p]);
          simdgroup_load(left, memory.query + at, DK + 8);
          simdgroup_multiply_accumulate(query_state[p], left, state[d], query_state[p]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    apply_decay<DK>(memory, thread_id, threads.x);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) solve<DK>(memory, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (live_columns) {
      FloatMatrix left, update[kParts];                       // U, then diag(D_16) U
      #pragma unroll
      for (uint p = 0; p < kParts; p++) {
        update[p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        #pragma unroll
        for (uint i = 0; i <= p; i++) {
          BfloatMatrix value;
          simdgroup_load(value, memory.value + i * kMatrix * kValueStride + simdgroup * kMatrix, kValueStride);
          simdgroup_load(left, memory.from_value + p * kMatrix * kRows + i * kMatrix, kRows);
          simdgroup_multiply_accumulate(update[p], left, value, update[p]);
          simdgroup_load(left, memory.from_state + p * kMatrix * kRows + i * kMatrix, kRows);
          simdgroup_multiply_accumulate(update[p], left, key_state[i], update[p]);
        }
      }
      #pragma unroll
      for (uint p = 0; p < kParts; p++) {
        FloatMatrix sum;
        simdgroup_load(left, memory.start[p], kMatrix);
        simdgroup_multiply(sum, left, query_state[p]);
        #pragma unroll
        for (uint i = 0; i <= p; i++) {
          simdgroup_load(left, memory.products[1] + p * kMatrix * kRows + i * kMatrix, kRows);
          simdgroup_multiply_accumulate(sum, left, update[i], sum);
        }
        simdgroup_store(sum, memory.out[simdgroup] + p * kMatrix * kMatrix, kMatrix);
      }
      #pragma unroll
      for (uint p = 0; p < kParts; p++) {
        FloatMatrix scaled;
        simdgroup_load(left, memory.end[p], kMatrix);
        simdgroup_multiply(scaled, left, update[p]);
        update[p] = scaled;
      }
      const FloatMatrix whole(memory.start[kParts - 1][kMatrix * kMatrix - 1]);   // G_16
      #pragma unroll
      for (uint d = 0; d < DK / kMatrix; d++) {
        FloatMatrix next;
        simdgroup_multiply(next, whole, state[d]);
        #pragma unroll
        for (uint p = 0; p < kParts; p++) {
          BfloatMatrix key;
          simdgroup_load(key, memory.key + p * kMatrix * (DK + 8) + d * kMatrix, DK + 8, ulong2(0), true);
          simdgroup_multiply_accumulate(next, key, update[p], next);
        }
        state[d] = next;
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const uint out_row = lane / 2, half_row = lane % 2 * 4;
      if (out_row < live) {
        threadgroup const float* from = memory.out[simdgroup] + out_row * kMatrix + half_row;
        *(device bfloat4*)(out + (ulong(row + out_row) * heads + head) * args.dv + column + half_row) = bfloat4(float4(from[0], from[1], from[2], from[3]));
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);          // the chunk is used up
  }

  if (step.done != LILY_RUNNING || !live_columns) return;
  device float* after = ring + ulong((step.slot + 1) % LILY_RING_SLOTS) * args.ring_stride + state_offset;
  #pragma unroll
  for (uint d = 0; d < DK / kMatrix; d++) simdgroup_store(state[d], after + d * kMatrix, DK, ulong2(0), true);
}

#define INSTANTIATE(name, kernel_function, dk) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<dk>) kernel_function<dk>;
INSTANTIATE("gdn_chunk_d64", gdn_chunk, 64)
INSTANTIATE("gdn_chunk_d128", gdn_chunk, 128)
