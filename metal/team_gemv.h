// Matrix times one activation row with a prologue and an epilogue: D1 for the fused decode kernels.
// A prologue (norm, gate) costs more than reading x, so it must not be repeated for every few rows as a row per
// simdgroup would: the threads of a threadgroup form a team that shares each row. A thread computes its 32 inputs once,
// keeps them in registers and multiplies them with every row of the threadgroup. Partial sums meet in threadgroup
// memory, one exchange for kPassRows rows, and then one thread finishes each output, epilogue included.
//
// threads = 32 if k <= 1024 (then 8 to 32 lanes share a row), else ceil(k / 1024) simdgroups, up to what the kernel allows
// (a longer row is taken in steps); lane_blocks() times as long with more blocks a thread. Any grid.x is right: threadgroups take equal shares of the outputs. kPassRows rows
// each fill a GPU; a CPU is better off with a few threadgroups per worker. (python/lily/plans holds the same figures.)
#pragma once
#include "quant.h"

constant constexpr uint kPassRows = 16;       // rows of a team between two exchanges
constant constexpr uint kRowsAtOnce = 4;      // rows whose weights are in flight together
constant constexpr uint kMinLanes = 8;        // lanes that share a row, at least; a multiple of kPartials
constant constexpr uint kMostLaneBlocks = 8;

// Neighbouring blocks of a row that a thread takes in a step. One for a GPU, whose lanes then read 16 neighbouring bytes each; a CPU
// runs lane after lane, reads whole cache lines with more, and has fewer partial sums to add up. (policy.py, Tuning.lane_blocks)
// 0: rows_gemv.h.
constant uint kLaneBlocksSwitch [[function_constant(2)]];
METAL_FUNC uint lane_blocks() { return is_function_constant_defined(kLaneBlocksSwitch) ? kLaneBlocksSwitch : 1; }

// Floats of scratch for at most `threads` threads: a padded line of partial sums for each row, and one for the squares.
METAL_FUNC constexpr uint team_scratch(uint threads) { return (kPassRows + 1) * (threads + 1) + 4 * kPassRows; }

// threads is 32 or the whole row's team; a lone simdgroup needs no more than its own barrier.
METAL_FUNC void team_barrier(uint threads) {
  if (threads == 32) simdgroup_barrier(mem_flags::mem_threadgroup);
  else threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Pairs at distance 4, 2, 1, written out: a loop over halving widths keeps the values in memory.
METAL_FUNC float sum_partials(thread const float* v) {
  const float4 half_sum = float4(v[0], v[1], v[2], v[3]) + float4(v[4], v[5], v[6], v[7]);
  const float2 quarter_sum = half_sum.xy + half_sum.zw;
  return quarter_sum.x + quarter_sum.y;
}

METAL_FUNC float sum_parts(threadgroup const float* part, uint lanes) {
  float chain[kPartials] = {0.0f};
  for (uint i = 0; i < lanes; i += kPartials)
    for (uint j = 0; j < kPartials; j++) chain[j] += part[i + j];
  return sum_partials(chain);
}

METAL_FUNC void sum_activations(thread ActivationBlock& block) {
  float half_sum[16];
  for (uint i = 0; i < 16; i++) half_sum[i] = block.value[i] + block.value[i + 16];
  for (uint i = 0; i < 8; i++) half_sum[i] += half_sum[i + 8];
  for (uint i = 0; i < 4; i++) half_sum[i] += half_sum[i + 4];
  block.sum = (half_sum[0] + half_sum[1]) + (half_sum[2] + half_sum[3]);
}

// Prologue of RMSNorm: x = h * g; its scalar waits for the epilogue, when the sum of the squares is known.
METAL_FUNC ActivationBlock load_normed(device const bfloat* h, device const float* g, thread float& square) {
  ActivationBlock x;
  float part[kPartials] = {0.0f};
  for (uint step = 0; step < kBlock; step += kPartials)
    for (uint i = 0; i < kPartials; i++) {
      const float value = float(h[step + i]);
      part[i] = fma(value, value, part[i]);
      x.value[step + i] = value * g[step + i];
    }
  square += sum_partials(part);
  sum_activations(x);
  return x;
}

#include "rows_gemv.h"

// Runs `job` over its outputs, each of which needs PER_OUTPUT rows (1, or 2: gate and up). A job has
//   uint blocks                                      blocks of 32 inputs in a row
//   float square                                     sum of squares of the inputs loaded so far (0 where unused)
//   ActivationBlock load(block, active)              prologue; called by all threads of a simdgroup, active or not, for each of
//                                                    their lane_blocks() neighbouring blocks in turn
//   void accumulate(output, which, block, x, sum, rest)   row `which` of the output, as in quant.h
//   void store(output, sums, squares, lanes)         epilogue, in one thread; squares: `lanes` partial sums
template <uint PER_OUTPUT, typename Job>
METAL_FUNC void team_gemv(thread Job& job, uint outputs, threadgroup float* scratch, uint group, uint groups, uint thread_id, uint threads) {
  constexpr uint kUnitOutputs = kRowsAtOnce / PER_OUTPUT;      // a unit: the rows that one thread has in flight
  const uint span = lane_blocks();
  if (span == 0) {
    rows_gemv<PER_OUTPUT>(job, outputs, scratch, group, groups, thread_id, threads);
    return;
  }
  uint lanes = threads == 32 ? kMinLanes : threads;
  while (lanes < 32 && lanes * span < job.blocks) lanes *= 2;
  const uint teams = threads / lanes, team = thread_id / lanes, part = thread_id % lanes, line = lanes + 1;   // padded: no bank conflicts
  const uint steps = (job.blocks + lanes * span - 1) / (lanes * span);
  const uint units = (outputs + kUnitOutputs - 1) / kUnitOutputs, share = (units + groups - 1) / groups;
  const uint first = min(units, group * share), end = min(units, first + share), pass_units = kPassRows / kRowsAtOnce * teams;
  threadgroup float* squares = scratch + kPassRows * teams * line;
  ActivationBlock x[kMostLaneBlocks];
  for (uint pass = first; pass < end; pass += pass_units) {
    const uint pass_end = min(end, pass + pass_units);
    for (uint step = 0; step < steps; step++) {
      const uint block = (step * lanes + part) * span, count = min(span, job.blocks - min(block, job.blocks));
      if (steps > 1 || pass == first)
        for (uint c = 0; c < span; c++) x[c] = job.load(c < count ? block + c : 0, c < count);
      for (uint unit = pass + team; unit < pass_end; unit += teams) {
        float sum[kRowsAtOnce][kPartials], rest[kRowsAtOnce], total[kRowsAtOnce];
        for (uint r = 0; r < kRowsAtOnce; r++) {
          rest[r] = 0.0f;
          for (uint i = 0; i < kPartials; i++) sum[r][i] = 0.0f;
        }
        for (uint c = 0; c < count; c++)
          for (uint r = 0; r < kRowsAtOnce; r++)               // outputs past the end repeat the last one and are not stored
            job.accumulate(min(unit * kUnitOutputs + r / PER_OUTPUT, outputs - 1), r % PER_OUTPUT, block + c, x[c], sum[r], rest[r]);
        for (uint r = 0; r < kRowsAtOnce; r++) total[r] = sum_partials(sum[r]) + rest[r];
        threadgroup float* to = scratch + (unit - pass) * kRowsAtOnce * line + part;
        for (uint r = 0; r < kRowsAtOnce; r++) to[r * line] = step == 0 ? total[r] : to[r * line] + total[r];
      }
    }
    if (pass == first && team == 0) squares[part] = job.square;
    team_barrier(threads);
    const uint pass_outputs = min(outputs, pass_end * kUnitOutputs) - pass * kUnitOutputs;
    for (uint i = thread_id; i < pass_outputs; i += threads) {
      float sums[PER_OUTPUT];
      for (uint which = 0; which < PER_OUTPUT; which++) sums[which] = sum_parts(scratch + (i * PER_OUTPUT + which) * line, lanes);
      job.store(pass * kUnitOutputs + i, sums, squares, lanes);
    }
    if (pass + pass_units < end) team_barrier(threads);
  }
}
