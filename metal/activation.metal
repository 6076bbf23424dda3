// Elementwise gates between two projections. A thread handles eight neighbouring columns (16 bytes), which every
// width allows: widths are multiples of 64.
#include <metal_stdlib>
#include "common.h"
using namespace metal;

constant constexpr uint kActivationThreads = 64;
constant constexpr uint kColumns = 8;          // per thread; grid.x = ceil(columns / (kColumns * threads per group))

METAL_FUNC float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// Experts and shared expert between gate|up and down: out = silu(gate) * up. grid = (., rows).
[[kernel, max_total_threads_per_threadgroup(kActivationThreads)]] void silu_mul(
    device const bfloat* x [[buffer(0)]],      // [rows, ldx]: gate in columns 0..width, up in width..2 width
    device bfloat* out [[buffer(1)]],          // [rows, ldy]
    constant SiluMulArgs& args [[buffer(2)]],
    uint3 thread_id [[thread_position_in_grid]]) {
  const uint column = thread_id.x * kColumns, row = thread_id.y;
  if (column >= args.width) return;
  device const bfloat* gate = x + row * args.ldx + column;
  device const bfloat* up = gate + args.width;
  device bfloat* to = out + row * args.ldy + column;
  for (uint i = 0; i < kColumns; i++) {
    const float g = float(gate[i]);
    to[i] = bfloat(g * sigmoid(g) * float(up[i]));
  }
}

// Attention before o_proj: o *= sigmoid(gate), in place; q_proj left each head's gate behind its query. grid = (., rows).
[[kernel, max_total_threads_per_threadgroup(kActivationThreads)]] void output_gate(
    device bfloat* o [[buffer(0)]],            // [rows, heads * head_dim]
    device const bfloat* proj [[buffer(1)]],   // [rows, ldp]: per head query head_dim, then gate head_dim
    constant OutputGateArgs& args [[buffer(2)]],
    uint3 thread_id [[thread_position_in_grid]]) {
  const uint column = thread_id.x * kColumns, row = thread_id.y, width = args.heads * args.head_dim;
  if (column >= width) return;
  const uint head = column / args.head_dim;
  device const bfloat* gate = proj + row * args.ldp + column + (head + 1) * args.head_dim;
  device bfloat* to = o + row * width + column;
  for (uint i = 0; i < kColumns; i++) to[i] = bfloat(float(to[i]) * sigmoid(float(gate[i])));
}
