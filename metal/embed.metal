// Token embedding: the first kernel of every pass.
#include <metal_stdlib>
#include "common.h"
#include "quant.h"
using namespace metal;

constant constexpr uint kEmbedThreads = 64;   // threads per row and group, one block of 32 columns each at a time

// One row of the packed table as bf16. Ids are checked on the host; the clamp keeps a bad one inside the table.
template <int BITS, int GROUP>
METAL_FUNC void embed_row(device const uint4* w, device const bfloat* scales, device const bfloat* biases, uint id,
                          device bfloat* out, constant EmbedArgs& args, uint first, uint step) {
  const QuantMatrix<BITS, GROUP> table{w, scales, biases, args.hidden / kBlock};
  for (uint block = first; block < table.blocks; block += step) table.expand(min(id, args.vocab - 1), block, out + block * kBlock);
}

// Prefill: ids come from the host. grid = (any, rows); grid.x = 1 is enough.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kEmbedThreads)]] void embed(
    device const uint4* w [[buffer(0)]],
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const uint* ids [[buffer(3)]],
    device bfloat* out [[buffer(4)]],              // [rows, hidden]
    constant EmbedArgs& args [[buffer(5)]],
    uint3 thread_id [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  const uint row = thread_id.y;
  embed_row<BITS, GROUP>(w, scales, biases, ids[row], out + row * args.hidden, args, thread_id.x, threads.x);
}

// D2, decode: the id is the token the previous step left on the GPU, so the CPU is not waited for.
template <int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(kEmbedThreads)]] void embed_step(
    device const uint4* w [[buffer(0)]],
    device const bfloat* scales [[buffer(1)]],
    device const bfloat* biases [[buffer(2)]],
    device const StepState& state [[buffer(3)]],
    device bfloat* out [[buffer(4)]],              // [1, hidden]
    constant EmbedArgs& args [[buffer(5)]],
    uint3 thread_id [[thread_position_in_grid]],
    uint3 threads [[threads_per_grid]]) {
  embed_row<BITS, GROUP>(w, scales, biases, state.tokens[state.step & 1], out, args, thread_id.x, threads.x);
}

#define INSTANTIATE(name, kernel_function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(kernel_function<__VA_ARGS__>) kernel_function<__VA_ARGS__>;
#define INSTANTIATE_QUANT(bits, group)                            \
  INSTANTIATE("embed_b" #bits "_g" #group, embed, bits, group)    \
  INSTANTIATE("embed_step_b" #bits "_g" #group, embed_step, bits, group)

INSTANTIATE_QUANT(4, 32)
INSTANTIATE_QUANT(4, 64)
INSTANTIATE_QUANT(4, 128)
INSTANTIATE_QUANT(8, 32)
INSTANTIATE_QUANT(8, 64)
INSTANTIATE_QUANT(8, 128)
