// The control of P4: the recurrence of gdn.metal with its state in device memory between blocks of rows, as it is when a
// threadgroup stages a block of q and k for all its columns: at 2,048 rows of the 35B 64 round trips of 2 MiB, 256 MiB a layer.
#include "common.h"
#include "lanes.h"

constant constexpr uint kBlockRows = 32;

// A quad per state column. The next ring slot holds the state while the pass runs, so a stopped step, which must not touch it,
// computes nothing at all. grid = (dv / (threads / 4), v_heads).
template <uint DK>
[[kernel, max_total_threads_per_threadgroup(256)]] void gdn_scan_blockwise(
    device const bfloat* c [[buffer(0)]],      // [rows, ldc]: q, k, v
    device const float* decay [[buffer(1)]],   // [rows, v_heads]
    device const float* beta [[buffer(2)]],    // [rows, v_heads]
    device float* ring [[buffer(3)]],          // [slots][v_heads, dv, dk]
    device bfloat* out [[buffer(4)]],          // [rows, v_heads * dv]
    device const StepState& step [[buffer(5)]],
    constant ScanArgs& args [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint2 threads [[threads_per_threadgroup]]) {
  threadgroup BfloatChunk query[kBlockRows][DK / kChunk], key[kBlockRows][DK / kChunk];
  if (step.done != LILY_RUNNING) return;
  const uint head = group.y, width = args.k_heads * DK, part = thread_id % kQuad;
  const uint column = (group.x * threads.x + thread_id) / kQuad;
  const bool live = column < args.dv;
  device const bfloat* q = c + head / (args.v_heads / args.k_heads) * DK;
  device const bfloat* k = q + width;
  device const bfloat* v = c + 2 * width + head * args.dv + (live ? column : 0);
  const ulong offset = (ulong(head) * args.dv + (live ? column : 0)) * DK;
  device const float* before = ring + ulong(step.slot) * args.ring_stride + offset;
  device float* state = ring + ulong((step.slot + 1) % LILY_RING_SLOTS) * args.ring_stride + offset;

  for (uint block = 0; block < args.rows; block += kBlockRows) {
    const uint rows = min(kBlockRows, args.rows - block);
    for (uint i = thread_id; i < rows * (DK / kChunk); i += threads.x) {
      const uint row = i / (DK / kChunk), piece = i % (DK / kChunk);
      query[row][piece] = *(device const BfloatChunk*)(q + ulong(block + row) * args.ldc + piece * kChunk);
      key[row][piece] = *(device const BfloatChunk*)(k + ulong(block + row) * args.ldc + piece * kChunk);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float column_state[DK / (kQuad * kChunk)][kChunk];
    #pragma unroll
    for (uint s = 0; s < DK / (kQuad * kChunk); s++) load_chunk((block == 0 ? before : state) + (s * kQuad + part) * kChunk, column_state[s]);
    for (uint row = 0; row < rows; row++) {
      float sk[kChunk] = {0.0f}, sq[kChunk] = {0.0f}, kq[kChunk] = {0.0f};
      #pragma unroll
      for (uint s = 0; s < DK / (kQuad * kChunk); s++) {
        const BfloatChunk k_piece = key[row][s * kQuad + part], q_piece = query[row][s * kQuad + part];
        for (uint i = 0; i < kChunk; i++) {
          sk[i] = fma(column_state[s][i], float(k_piece.value[i]), sk[i]);
          sq[i] = fma(column_state[s][i], float(q_piece.value[i]), sq[i]);
          kq[i] = fma(float(k_piece.value[i]), float(q_piece.value[i]), kq[i]);
        }
      }
      const float4 sums = quad_sum(float4(sum_chunk(sk), sum_chunk(sq), sum_chunk(kq), 0.0f));
      const uint gate = (block + row) * args.v_heads + head;
      const float g = decay[gate], delta = beta[gate] * (float(v[ulong(block + row) * args.ldc]) - g * sums.x);
      #pragma unroll
      for (uint s = 0; s < DK / (kQuad * kChunk); s++) {
        const BfloatChunk k_piece = key[row][s * kQuad + part];
        for (uint i = 0; i < kChunk; i++) column_state[s][i] = fma(delta, float(k_piece.value[i]), g * column_state[s][i]);
      }
      if (live && part == 0) out[ulong(gate) * args.dv + column] = bfloat(fma(delta, sums.z, g * sums.y));
    }
    if (live)
      #pragma unroll
      for (uint s = 0; s < DK / (kQuad * kChunk); s++) store_chunk(state + (s * kQuad + part) * kChunk, column_state[s]);
    threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  }
}

#define INSTANTIATE(name, kernel_function, dk) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<dk>) kernel_function<dk>;
INSTANTIATE("gdn_scan_blockwise_d64", gdn_scan_blockwise, 64)
INSTANTIATE("gdn_scan_blockwise_d128", gdn_scan_blockwise, 128)
