// The jobs of team_gemv.h with whole rows a thread, for a processor that runs threads one after another and fetches ahead where it sees
// memory read in order: a thread keeps all inputs and reads a run of neighbouring rows from end to end, and meets no other thread.
// Each thread computes the inputs again, which pays where the prologue is cheap. (policy.py, Tuning.whole_rows)
#pragma once

constant constexpr uint kMostRowBlocks = 144;   // whose inputs a thread keeps; longer rows are a team's

template <uint PER_OUTPUT, typename Job>
METAL_FUNC void rows_gemv(thread Job& job, uint outputs, uint group, uint groups, uint thread_id, uint threads) {
  const uint workers = groups * threads, worker = group * threads + thread_id, share = (outputs + workers - 1) / workers;
  const uint first = min(outputs, worker * share), end = min(outputs, first + share);
  if (first == end) return;
  ActivationBlock x[kMostRowBlocks];
  for (uint block = 0; block < job.blocks; block++) x[block] = job.load(block, true);
  for (uint output = first; output < end; output++) {
    float sums[PER_OUTPUT];
    for (uint which = 0; which < PER_OUTPUT; which++) {
      float sum[kPartials] = {0.0f}, rest = 0.0f;
      for (uint block = 0; block < job.blocks; block++) job.accumulate(output, which, block, x[block], sum, rest);
      sums[which] = sum_partials(sum) + rest;
    }
    job.store(output, sums, job.square);
  }
}
