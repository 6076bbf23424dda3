// Matrix times one activation row with a prologue and an epilogue: D1 for the fused decode kernels.
// A prologue (norm, gate) costs more than reading x, so it must not be repeated for every few rows as a row per
// simdgroup would: the threads of a threadgroup form a team that shares each row. A thread computes its 32 inputs once,
// keeps them in registers and multiplies them with every row of the threadgroup. Partial sums (of lanes, or with prefetched rows
// of simdgroups) meet in threadgroup memory, one exchange for kPassRows rows, and then one thread finishes each output, epilogue included.
//
// threads = 32 if k <= 1024 (then 8 to 32 lanes share a row), else ceil(k / 1024) simdgroups, up to what the kernel allows
// (a longer row is taken in steps); lane_blocks() times as long with more blocks a thread. Any grid.x is right: threadgroups
// take equal shares of the outputs. kPassRows rows each fill a GPU; a CPU is better off with a few threadgroups per worker.
// (python/lily/plans holds the same figures.)
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

// How a thread with one block a lane goes through its rows (policy.py, Tuning.prefetch_rows). Off: the products of four rows follow
// their loads. On: the next four are asked for before the present ones are multiplied, the first before the inputs are read; for a GPU
// whose memory is far away, at the price of registers. Four bits become floats without conversions there (quant.h, multiply), and
// simdgroups add their lanes' sums up before they exchange.
constant bool kPrefetchSwitch [[function_constant(3)]];
METAL_FUNC bool prefetch_rows() { return is_function_constant_defined(kPrefetchSwitch) && kPrefetchSwitch; }

// Floats of scratch for at most `threads` threads: a padded line of partial sums for each row, and one for the squares.
METAL_FUNC constexpr uint team_scratch(uint threads) { return (kPassRows + 1) * (threads + 1) + 4 * kPassRows; }

// threads is 32 or the whole row's team; a lone simdgroup needs no more than its own barrier.
METAL_FUNC void team_barrier(uint threads) {
  if (threads == 32) simdgroup_barrier(mem_flags::mem_threadgroup);
  else threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The sum of a line: of each lane's part, or of each simdgroup's, of which there are few.
METAL_FUNC float sum_line(threadgroup const float* part, uint count, bool few) {
  float chain[kPartials] = {0.0f};
  if (few) {
    for (uint i = 0; i < count; i++) chain[0] += part[i];
    return chain[0];
  }
  for (uint i = 0; i < count; i += kPartials)
    for (uint j = 0; j < kPartials; j++) chain[j] += part[i + j];
  return sum_partials(chain);
}

// The sum over `width` neighbouring lanes (a power of two), in each of them.
METAL_FUNC float lanes_total(float value, uint width) {
  for (uint distance = width / 2; distance > 0; distance /= 2) value += simd_shuffle_xor(value, distance);
  return value;
}

// What a lane and its neighbour at `distance` have of one of two sums; the lanes that `take` it go on with the second.
METAL_FUNC float exchange(float first, float second, bool take, uint distance) {
  const float kept = take ? second : first, given = take ? first : second;
  return kept + simd_shuffle_xor(given, distance);
}

// Four rows' sums over `width` lanes (8 or more), with six exchanges at 32 lanes instead of twenty: half of the lanes go on with two of the
// rows, then a quarter with one. A lane is left with row 4 lane / width.
METAL_FUNC float transposed_total(thread const float* row, uint lane, uint width) {
  const bool upper = lane & (width / 2), odd = lane & (width / 4);
  const float first = exchange(row[0], row[2], upper, width / 2), second = exchange(row[1], row[3], upper, width / 2);
  return lanes_total(exchange(first, second, odd, width / 4), width / 4);
}

// Adds a unit's sums to their lines, one number a simdgroup. lines: of the unit's first row.
METAL_FUNC void share_totals(thread const float* total, uint part, uint width, threadgroup float* lines, uint line, bool first_step, bool mine) {
  const uint lane = part & (width - 1), row = (lane & (width / 2) ? 2 : 0) + (lane & (width / 4) ? 1 : 0);
  const float sum = width == 32 ? transposed_total(total, lane, 32) : transposed_total(total, lane, width);   // constants make short code
  threadgroup float* to = lines + row * line + part / 32;
  if (mine && (lane & (width / 4 - 1)) == 0) *to = first_step ? sum : *to + sum;
}

// Prologue of RMSNorm: x = h * g; its scalar waits for the epilogue, when the sum of the squares is known.
METAL_FUNC ActivationBlock load_normed(device const bfloat* h, device const float* g, thread float& square) {
  ActivationBlock x;
  const BfloatBlock stored = *(device const BfloatBlock*)h;
  float part[kPartials] = {0.0f};
  load_floats(g, x.value);
  for (uint step = 0; step < kBlock; step += kPartials)
    for (uint i = 0; i < kPartials; i++) {
      const float value = float(stored.value[step + i]);
      part[i] = fma(value, value, part[i]);
      x.value[step + i] *= value;
    }
  square += sum_partials(part);
  sum_activations(x);
  return x;
}

template <uint PER_OUTPUT, typename Job>
METAL_FUNC void fetch_unit(thread const Job& job, uint unit, uint outputs, uint block, thread typename Job::Row* rows) {
  #pragma unroll
  for (uint r = 0; r < kRowsAtOnce; r++) rows[r] = job.fetch(min((unit * kRowsAtOnce + r) / PER_OUTPUT, outputs - 1), r % PER_OUTPUT, block);
}

// How the threads of a threadgroup divide a row of `blocks` blocks.
struct Team {
  uint lanes, teams, team, part, steps;         // part: of the row, in 0 .. lanes
};
METAL_FUNC Team make_team(uint blocks, uint thread_id, uint threads) {
  const uint span = lane_blocks();
  Team team;
  team.lanes = threads == 32 ? kMinLanes : threads;
  while (team.lanes < 32 && team.lanes * span < blocks) team.lanes *= 2;
  team.teams = threads / team.lanes;
  team.team = thread_id / team.lanes;
  team.part = thread_id % team.lanes;
  team.steps = (blocks + team.lanes * span - 1) / (team.lanes * span);
  return team;
}

// A thread's inputs in one step.
struct TeamInputs {
  ActivationBlock x[kMostLaneBlocks];
  bool loaded;                                  // those of the first step, by the caller: while it waits for something else
};
template <typename Job>
METAL_FUNC void load_inputs(thread Job& job, thread const Team& team, uint step, thread TeamInputs& inputs) {
  const uint span = lane_blocks(), block = (step * team.lanes + team.part) * span, count = min(span, job.blocks - min(block, job.blocks));
  for (uint c = 0; c < span; c++) inputs.x[c] = job.load(c < count ? block + c : 0, c < count);
}

#include "rows_gemv.h"

// Runs `job` over its outputs, each of which needs PER_OUTPUT rows (1, or 2: gate and up). A job has
//   uint blocks                                      blocks of 32 inputs in a row
//   float square                                     sum of squares of the inputs loaded so far (0 where unused)
//   ActivationBlock load(block, active)              prologue; called by all threads of a simdgroup, active or not, for each of
//                                                    their lane_blocks() neighbouring blocks in turn
//   void accumulate(output, which, block, x, sum, rest)   row `which` of the output, as in quant.h
//   Row fetch(output, which, block)                  such a row's block on its way, which multiply(Row, x, total) accumulates
//   void store(output, sums, square)                 epilogue, in one thread; square: of all inputs, where needs_square()
template <uint PER_OUTPUT, typename Job>
METAL_FUNC void team_gemv(thread Job& job, uint outputs, threadgroup float* scratch, uint group, uint groups, uint thread_id, uint threads,
                          thread TeamInputs& inputs) {
  constexpr uint kUnitOutputs = kRowsAtOnce / PER_OUTPUT;      // a unit: the rows that a thread multiplies together
  const uint span = lane_blocks();
  if (span == 0) {
    rows_gemv<PER_OUTPUT>(job, outputs, group, groups, thread_id, threads);
    return;
  }
  const Team place = make_team(job.blocks, thread_id, threads);
  const uint lanes = place.lanes, teams = place.teams, team = place.team, part = place.part, steps = place.steps;
  const bool prefetch = prefetch_rows();
  const uint width = min(lanes, 32u), sharers = prefetch ? (lanes + 31) / 32 : lanes, line = prefetch ? sharers : lanes + 1;   // padded: no bank conflicts
  const uint units = (outputs + kUnitOutputs - 1) / kUnitOutputs, share = (units + groups - 1) / groups;
  const uint first = min(units, group * share), end = min(units, first + share), pass_units = kPassRows / kRowsAtOnce * teams;
  threadgroup float* squares = scratch + kPassRows * teams * line;
  thread ActivationBlock* x = inputs.x;
  typename Job::Row next[kRowsAtOnce];
  for (uint pass = first; pass < end; pass += pass_units) {
    const uint pass_end = min(end, pass + pass_units);
    for (uint step = 0; step < steps; step++) {
      const uint block = (step * lanes + part) * span, count = min(span, job.blocks - min(block, job.blocks));
      if (prefetch && (steps > 1 || pass == first))
        fetch_unit<PER_OUTPUT>(job, pass + team, outputs, count ? block : 0, next);
      if (steps > 1 || (pass == first && !inputs.loaded)) load_inputs(job, place, step, inputs);
      for (uint base = pass; base < pass_end; base += teams) {     // the same for all lanes of a simdgroup, which exchange
        const uint unit = base + team;
        const bool mine = unit < pass_end;
        if (!prefetch && !mine) break;
        if (prefetch) {
          float total[kRowsAtOnce] = {0.0f};
          typename Job::Row present[kRowsAtOnce];
          for (uint r = 0; r < kRowsAtOnce; r++) present[r] = next[r];
          if (base + teams < (steps > 1 ? pass_end : end))     // a row that takes one step goes on into the next pass
            fetch_unit<PER_OUTPUT>(job, unit + teams, outputs, count ? block : 0, next);
          if (count)
            for (uint r = 0; r < kRowsAtOnce; r++) job.multiply(present[r], x[0], total[r]);
          share_totals(total, part, width, scratch + (unit - pass) * kRowsAtOnce * line, line, step == 0, mine);
        } else {
          float sum[kRowsAtOnce][kPartials], rest[kRowsAtOnce], total[kRowsAtOnce];
          for (uint r = 0; r < kRowsAtOnce; r++) {
            rest[r] = 0.0f;
            for (uint i = 0; i < kPartials; i++) sum[r][i] = 0.0f;
          }
          for (uint c = 0; c < count; c++)
            for (uint r = 0; r < kRowsAtOnce; r++)             // outputs past the end repeat the last one and are not stored
              job.accumulate(min(unit * kUnitOutputs + r / PER_OUTPUT, outputs - 1), r % PER_OUTPUT, block + c, x[c], sum[r], rest[r]);
          for (uint r = 0; r < kRowsAtOnce; r++) total[r] = sum_partials(sum[r]) + rest[r];
          threadgroup float* to = scratch + (unit - pass) * kRowsAtOnce * line + part;
          for (uint r = 0; r < kRowsAtOnce; r++) to[r * line] = step == 0 ? total[r] : to[r * line] + total[r];
        }
      }
    }
    if (pass == first && job.needs_square()) {
      const float square = prefetch ? lanes_total(job.square, width) : job.square;
      if (team == 0 && (!prefetch || (part & (width - 1)) == 0)) squares[prefetch ? part / 32 : part] = square;
    }
    team_barrier(threads);
    const uint pass_outputs = min(outputs, pass_end * kUnitOutputs) - pass * kUnitOutputs;
    for (uint i = thread_id; i < pass_outputs; i += threads) {
      float sums[PER_OUTPUT];
      for (uint which = 0; which < PER_OUTPUT; which++) sums[which] = sum_line(scratch + (i * PER_OUTPUT + which) * line, sharers, prefetch);
      job.store(pass * kUnitOutputs + i, sums, job.needs_square() ? sum_line(squares, sharers, prefetch) : 0.0f);
    }
    if (pass + pass_units < end) team_barrier(threads);
  }
}

template <uint PER_OUTPUT, typename Job>
METAL_FUNC void team_gemv(thread Job& job, uint outputs, threadgroup float* scratch, uint group, uint groups, uint thread_id, uint threads) {
  TeamInputs inputs;
  inputs.loaded = false;
  team_gemv<PER_OUTPUT>(job, outputs, scratch, group, groups, thread_id, threads, inputs);
}
