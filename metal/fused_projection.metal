// Decode projections fused with what stands before and after them (past D4: "extended fusion"); one activation row.
// Each saves a stage of the step, which costs more than the kernel it replaces: the arithmetic rides on a GEMV that waits
// for memory anyway. Intermediates stay f32 where the separate kernels round them to bf16. Geometry: team_gemv.h.
#include "common.h"
#include "lanes.h"
#include "team_gemv.h"

constant constexpr uint kNormThreads = 64;     // hidden sizes: 2048 in one step
constant constexpr uint kMixerThreads = 128;   // a mixer's output: 4096 in one step

template <typename Matrix, typename Out>
struct NormJob {
  using Row = typename Matrix::Row;
  Matrix matrix;
  device const bfloat* h;
  device const float* weight;
  device Out* y;
  float eps, inputs;
  uint blocks;
  float square;

  METAL_FUNC ActivationBlock load(uint block, bool active) {
    float own = 0.0f;
    const ActivationBlock x = load_normed(h + block * kBlock, weight + block * kBlock, own);
    if (active) square += own;
    return x;
  }
  METAL_FUNC void accumulate(uint output, uint, uint block, thread const ActivationBlock& x, thread float* sum, thread float& rest) const {
    matrix.accumulate(output, block, x, sum, rest);
  }
  METAL_FUNC Row fetch(uint output, uint, uint block) const { return matrix.fetch(output, block); }
  METAL_FUNC void multiply(thread const Row& row, thread const ActivationBlock& x, thread float& total) const {
    matrix.multiply(row, x, total);
  }
  METAL_FUNC bool needs_square() const { return true; }
  METAL_FUNC void store(uint output, thread const float* sums, float square) const {
    y[output] = Out(sums[0] * fast::rsqrt(fast::divide(square, inputs) + eps));
  }
};

// Before the mixer, before the router and before the head: RMSNorm and the projection that reads it. The norm's weight goes in
// while h is read, its scalar comes out of the dot product, so no row waits for a pass over h.
template <typename Out, int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kNormThreads)]] void gemv_norm(
    device const uint4* w [[buffer(0)]],
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* h [[buffer(3)]],        // [k]
    device Out* y [[buffer(4)]],                 // [n]
    constant GemvNormArgs& args [[buffer(5)]],
    device const float* weight [[buffer(6)]],    // [k]
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[team_scratch(kNormThreads)];
  const uint blocks = args.k / kBlock;
  NormJob<QuantMatrix<BITS, GROUP>, Out> job{{w, scales, biases, blocks}, h, weight, y, args.eps, float(args.k), blocks, 0.0f};
  team_gemv<1>(job, args.n, scratch, group.x, groups.x, thread_id, threads.x);
}

// The same for rows a checkpoint leaves in bf16.
template <typename Out>
[[kernel, max_total_threads_per_threadgroup(kNormThreads)]] void gemv_norm_dense(
    device const bfloat* w [[buffer(0)]],
    device const bfloat* h [[buffer(3)]],
    device Out* y [[buffer(4)]],
    constant GemvNormArgs& args [[buffer(5)]],
    device const float* weight [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[team_scratch(kNormThreads)];
  const uint blocks = args.k / kBlock;
  NormJob<DenseMatrix, Out> job{{w, blocks}, h, weight, y, args.eps, float(args.k), blocks, 0.0f};
  team_gemv<1>(job, args.n, scratch, group.x, groups.x, thread_id, threads.x);
}

// h += W x: the mixer's output projection with the residual addition. The prologue makes x from what the mixer left.
template <typename Matrix, typename Prologue>
struct ResidualJob {
  using Row = typename Matrix::Row;
  Matrix matrix;
  Prologue prologue;
  device bfloat* h;
  uint blocks;
  float square;

  METAL_FUNC ActivationBlock load(uint block, bool) const { return prologue.load(block); }
  METAL_FUNC void accumulate(uint output, uint, uint block, thread const ActivationBlock& x, thread float* sum, thread float& rest) const {
    matrix.accumulate(output, block, x, sum, rest);
  }
  METAL_FUNC Row fetch(uint output, uint, uint block) const { return matrix.fetch(output, block); }
  METAL_FUNC void multiply(thread const Row& row, thread const ActivationBlock& x, thread float& total) const {
    matrix.multiply(row, x, total);
  }
  METAL_FUNC bool needs_square() const { return false; }
  METAL_FUNC void store(uint output, thread const float* sums, float) const {
    h[output] = bfloat(float(h[output]) + sums[0]);
  }
};

struct GatedNorm {
  device const bfloat* o;
  device const bfloat* z;
  device const float* weight;
  float eps;
  uint dv;

  METAL_FUNC float square_of(thread const ActivationBlock& x) const {
    float part[kPartials] = {0.0f};
    for (uint step = 0; step < kBlock; step += kPartials)
      for (uint i = 0; i < kPartials; i++) part[i] = fma(x.value[step + i], x.value[step + i], part[i]);
    return sum_partials(part);
  }
  // A head is 2 or 4 neighbouring blocks, of as many lanes: its sum of squares is a sum over a pair or a quad. A lane with more
  // than one block sums the head's on its own.
  METAL_FUNC ActivationBlock load(uint block) const {
    ActivationBlock x = load_activations(o + block * kBlock);
    float square = 0.0f;
    if (lane_blocks() == 1) {
      square = square_of(x);
      square += simd_shuffle_xor(square, 1);
      if (dv == 4 * kBlock) square += simd_shuffle_xor(square, 2);
    } else {
      const uint per_head = dv / kBlock, first = block - block % per_head;
      for (uint i = 0; i < per_head; i++) {
        const ActivationBlock other = load_activations(o + (first + i) * kBlock);
        square += square_of(other);
      }
    }
    const float scale = fast::rsqrt(fast::divide(square, float(dv)) + eps);
    const BfloatBlock gate = *(device const BfloatBlock*)(z + block * kBlock);
    float g[kBlock];
    load_floats(weight + block * kBlock % dv, g);
    for (uint i = 0; i < kBlock; i++) x.value[i] *= scale * g[i] * silu(float(gate.value[i]));
    sum_activations(x);
    return x;
  }
};

// End of a GDN mixer: gated norm of the recurrence's output, out_proj, residual.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kMixerThreads)]] void gemv_gated_norm_add(
    device const uint4* w [[buffer(0)]],
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* o [[buffer(3)]],        // [heads * dv]
    device bfloat* h [[buffer(4)]],              // [n], h += ...
    constant GatedNormAddArgs& args [[buffer(5)]],
    device const bfloat* z [[buffer(6)]],        // [heads * dv]
    device const float* weight [[buffer(7)]],    // [dv]
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[team_scratch(kMixerThreads)];
  const uint blocks = args.k / kBlock;
  ResidualJob<QuantMatrix<BITS, GROUP>, GatedNorm> job{{w, scales, biases, blocks}, {o, z, weight, args.eps, args.dv}, h, blocks, 0.0f};
  team_gemv<1>(job, args.n, scratch, group.x, groups.x, thread_id, threads.x);
}

struct OutputGate {
  device const bfloat* o;
  device const bfloat* proj;
  uint head_dim;

  METAL_FUNC ActivationBlock load(uint block) const {
    ActivationBlock x = load_activations(o + block * kBlock);
    const uint column = block * kBlock;
    const BfloatBlock gate = *(device const BfloatBlock*)(proj + column + (column / head_dim + 1) * head_dim);
    for (uint i = 0; i < kBlock; i++) x.value[i] *= sigmoid(float(gate.value[i]));
    sum_activations(x);
    return x;
  }
};

// End of an attention mixer: output gate, o_proj, residual.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kMixerThreads)]] void gemv_gate_add(
    device const uint4* w [[buffer(0)]],
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const bfloat* o [[buffer(3)]],        // [heads * head_dim]
    device bfloat* h [[buffer(4)]],              // [n], h += ...
    constant GateAddArgs& args [[buffer(5)]],
    device const bfloat* proj [[buffer(6)]],     // per head: query head_dim, then gate head_dim
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_id [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[team_scratch(kMixerThreads)];
  const uint blocks = args.k / kBlock;
  ResidualJob<QuantMatrix<BITS, GROUP>, OutputGate> job{{w, scales, biases, blocks}, {o, proj, args.head_dim}, h, blocks, 0.0f};
  team_gemv<1>(job, args.n, scratch, group.x, groups.x, thread_id, threads.x);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
#define INSTANTIATE_QUANT(bits, group)                                                    \
  INSTANTIATE("gemv_norm_bf16_b" #bits "_g" #group, gemv_norm, bfloat, bits, group)       \
  INSTANTIATE("gemv_norm_f32_b" #bits "_g" #group, gemv_norm, float, bits, group)         \
  INSTANTIATE("gemv_gated_norm_add_b" #bits "_g" #group, gemv_gated_norm_add, bits, group) \
  INSTANTIATE("gemv_gate_add_b" #bits "_g" #group, gemv_gate_add, bits, group)

INSTANTIATE_QUANT(4, 32)
INSTANTIATE_QUANT(4, 64)
INSTANTIATE_QUANT(4, 128)
INSTANTIATE_QUANT(8, 32)
INSTANTIATE_QUANT(8, 64)
INSTANTIATE_QUANT(8, 128)
INSTANTIATE("gemv_norm_bf16_w16", gemv_norm_dense, bfloat)
INSTANTIATE("gemv_norm_f32_w16", gemv_norm_dense, float)
