// What the device can do at best, for `lily bench`: reading and copying memory with no arithmetic, multiplying with no memory.
#include <metal_stdlib>
#include "common.h"
using namespace metal;

constant constexpr uint kProbeThreads = 1024;
constant constexpr uint kInFlight = 8;        // 16-byte loads that a thread issues before it uses the first

// Each simdgroup reads a contiguous run of the first `count` 16-byte words, as a GEMV reads its rows: the lanes side by side.
[[kernel, max_total_threads_per_threadgroup(kProbeThreads)]] void probe_read(
    device const uint4* data [[buffer(0)]],
    device uint* out [[buffer(1)]],                 // one word per simdgroup, so that no load may be left out
    constant ProbeArgs& args [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint worker = group * simdgroups + simdgroup, workers = groups * simdgroups;
  const uint share = (args.count + workers - 1) / workers, end = min(args.count, (worker + 1) * share);
  uint4 seen = uint4(0);
  uint at = worker * share + lane;
  for (; at + (kInFlight - 1) * 32 < end; at += kInFlight * 32) {
    uint4 words[kInFlight];
    for (uint i = 0; i < kInFlight; i++) words[i] = data[at + i * 32];
    for (uint i = 0; i < kInFlight; i++) seen ^= words[i];
  }
  for (; at < end; at += 32) seen ^= data[at];
  const uint all = simd_xor(seen.x ^ seen.y ^ seen.z ^ seen.w);
  if (lane == 0) out[worker] = all;
}

// The same with every word written to another place: `count` words read and as many written.
[[kernel, max_total_threads_per_threadgroup(kProbeThreads)]] void probe_copy(
    device const uint4* data [[buffer(0)]],
    device uint4* out [[buffer(1)]],
    constant ProbeArgs& args [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint worker = group * simdgroups + simdgroup, workers = groups * simdgroups;
  const uint share = (args.count + workers - 1) / workers, end = min(args.count, (worker + 1) * share);
  uint at = worker * share + lane;
  for (; at + (kInFlight - 1) * 32 < end; at += kInFlight * 32) {
    uint4 words[kInFlight];
    for (uint i = 0; i < kInFlight; i++) words[i] = data[at + i * 32];
    for (uint i = 0; i < kInFlight; i++) out[at + i * 32] = words[i];
  }
  for (; at < end; at += 32) out[at] = data[at];
}

// Products of 8 x 8 bf16 matrices that never leave the registers: `count` rounds of 4 x 4 products a simdgroup,
// 2 * 512 * 16 * count floating-point operations.
[[kernel, max_total_threads_per_threadgroup(256)]] void probe_matrix(
    device const bfloat* data [[buffer(0)]],        // 8 matrices of 64
    device float* out [[buffer(1)]],                // 16 matrices per simdgroup
    constant ProbeArgs& args [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  simdgroup_matrix<bfloat, 8, 8> left[4], right[4];
  simdgroup_matrix<float, 8, 8> sum[4][4];
  for (uint i = 0; i < 4; i++) {
    simdgroup_load(left[i], data + i * 64, 8);
    simdgroup_load(right[i], data + 256 + i * 64, 8);
    for (uint j = 0; j < 4; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (uint round = 0; round < args.count; round++)
    for (uint i = 0; i < 4; i++)
      for (uint j = 0; j < 4; j++) simdgroup_multiply_accumulate(sum[i][j], left[i], right[j], sum[i][j]);
  device float* mine = out + (group * simdgroups + simdgroup) * 16 * 64;
  for (uint i = 0; i < 4; i++)
    for (uint j = 0; j < 4; j++) simdgroup_store(sum[i][j], mine + (i * 4 + j) * 64, 8);
}
