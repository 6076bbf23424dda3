#include "decode_loop.h"

#include <stdexcept>

#include "common.h"

namespace lily {
namespace {

// Written by the GPU; read only after the command buffer that wrote it has completed.
const StepState& state_of(const Buffer& buffer) { return *reinterpret_cast<const StepState*>(buffer.contents()); }

}  // namespace

DecodeLoop::DecodeLoop(std::shared_ptr<Program> program, std::shared_ptr<Buffer> step_state, unsigned max_in_flight,
                       std::shared_ptr<Buffer> host_state)
    : program_(std::move(program)), step_state_(std::move(step_state)), host_state_(host_state ? std::move(host_state) : step_state_),
      max_in_flight_(max_in_flight) {
  for (const auto& buffer : {step_state_, host_state_})
    if (buffer->nbytes() < sizeof(StepState)) throw std::invalid_argument("the step state buffer is smaller than a StepState");
  host_state_->contents();  // throws for private storage
  if (max_in_flight_ < 1 || max_in_flight_ > LILY_RING_SLOTS - 1)
    throw std::invalid_argument("max_in_flight must be 1 to " + std::to_string(LILY_RING_SLOTS - 1));
}

DecodeLoop::~DecodeLoop() {
  try {
    drain(nullptr);
  } catch (const std::exception&) {  // nobody is left to tell
  }
}

void DecodeLoop::start(size_t steps) {
  if (!in_flight_.empty()) throw std::invalid_argument("start: steps are in flight, drain first");
  program_->device()->check_usable();
  to_encode_ = steps;
  next_step_ = state_of(*host_state_).step;
  stopped_ = steps == 0;
  gpu_ms_ = 0;
  if (stopped_) return;
  activity_ = std::make_unique<Activity>("lily: decoding");
  encode_ahead();
}

void DecodeLoop::set_program(std::shared_ptr<Program> program) { program_ = std::move(program); }

void DecodeLoop::encode_ahead() {
  while (to_encode_ > 0 && in_flight_.size() < max_in_flight_) {
    @autoreleasepool {
      id<MTLCommandBuffer> commands = program_->device()->new_command_buffer();
      program_->encode(commands);
      if (host_state_ != step_state_) {
        id<MTLBlitCommandEncoder> encoder = [commands blitCommandEncoder];
        [encoder copyFromBuffer:step_state_->metal() sourceOffset:0 toBuffer:host_state_->metal() destinationOffset:0 size:sizeof(StepState)];
        [encoder endEncoding];
      }
      in_flight_.push_back(program_->device()->submit(commands));
    }
    to_encode_--;
  }
}

// Nothing more will be encoded.
void DecodeLoop::finish() {
  stopped_ = true;
  to_encode_ = 0;
  activity_.reset();
}

std::optional<StepResult> DecodeLoop::next(const InterruptCheck& interrupted) {
  if (stopped_) return std::nullopt;
  if (in_flight_.empty()) {
    finish();
    return std::nullopt;
  }
  Submission& oldest = *in_flight_.front();
  try {
    if (!program_->device()->wait(oldest, interrupted)) {
      // The steps in flight are completed before the interrupt goes on; drain() counts them.
      program_->device()->drain();
      finish();
      throw Interrupted();
    }
  } catch (const DeviceError&) {
    program_->device()->drain();
    in_flight_.clear();
    finish();
    throw;
  }
  gpu_ms_ += oldest.gpu_seconds * 1e3;
  in_flight_.pop_front();
  const StepState& state = state_of(*host_state_);
  uint32_t place = next_step_++ % LILY_HISTORY;
  StepResult result = {state.history[place], state.flags[place]};
  if (result.flag != LILY_RUNNING) finish();
  else encode_ahead();  // before the caller looks at the token, so that the GPU does not wait for it
  return result;
}

size_t DecodeLoop::drain(const InterruptCheck& interrupted) {
  finish();
  size_t completed = 0;
  bool stop = false;
  std::string failure;
  while (!in_flight_.empty()) {
    try {
      if (!program_->device()->wait(*in_flight_.front(), stop ? InterruptCheck() : interrupted)) {
        stop = true;
        continue;
      }
      completed++;
    } catch (const DeviceError& error) {
      if (failure.empty()) failure = error.what();
    }
    in_flight_.pop_front();
  }
  if (!failure.empty()) throw DeviceError(failure);
  if (stop) throw Interrupted();
  return completed;
}

}  // namespace lily
