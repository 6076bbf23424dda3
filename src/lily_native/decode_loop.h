// Runs a decode program ahead of the host: tokens are handed over on the GPU (D2), the host reads them later.
#pragma once
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "program.h"

namespace lily {

struct StepResult {
  uint32_t token;
  uint32_t flag;  // StepState.done after the step: LILY_RUNNING, LILY_STOPPED or LILY_NONFINITE
};

class DecodeLoop {
 public:
  // step_state holds a StepState. Where the CPU cannot see it, host_state is a shared buffer that gets a copy after every
  // step (null: step_state is shared itself); both hold the same state when the loop starts. At most LILY_RING_SLOTS - 1 steps may be in flight: one more
  // would overwrite the state slot of the last delivered step, to which the session may have to return.
  DecodeLoop(std::shared_ptr<Program> program, std::shared_ptr<Buffer> step_state, unsigned max_in_flight, std::shared_ptr<Buffer> host_state);
  ~DecodeLoop();

  void start(size_t steps);
  // The next step's token, or nothing once all steps were delivered or the loop has stopped (flag != 0).
  std::optional<StepResult> next(const InterruptCheck& interrupted);
  // Waits for the steps in flight. Returns how many were completed beyond the last delivered one.
  size_t drain(const InterruptCheck& interrupted);
  // Steps encoded from now on use this program (the next context range).
  void set_program(std::shared_ptr<Program> program);

  double gpu_ms() const { return gpu_ms_; }  // of the steps delivered since start

 private:
  void encode_ahead();
  void finish();

  std::shared_ptr<Program> program_;
  std::shared_ptr<Buffer> step_state_, host_state_;
  unsigned max_in_flight_;
  std::deque<std::shared_ptr<Submission>> in_flight_;
  std::unique_ptr<Activity> activity_;
  size_t to_encode_ = 0;
  uint32_t next_step_ = 0;  // StepState.step of the step delivered next
  bool stopped_ = true;
  double gpu_ms_ = 0;
};

}  // namespace lily
