#include "stream_queue.h"

#include <time.h>

#include <chrono>

#include "submission.h"

namespace lily::cuda {
namespace {

using Clock = std::chrono::steady_clock;

struct Running {
  __strong LilyCommandBuffer* buffer;
  CUevent start, end;
  size_t mark;  // setBytes data up to here belongs to this command buffer or an earlier one
  Failure failure;
};

class Queue {
 public:
  explicit Queue(const std::shared_ptr<Context>& context) : context_(context) {
    usable_ = context->enter() && !context->note(driver().cuStreamCreate(&stream_, kStreamNonBlocking));
    submitter_ = std::make_unique<Submitter>(*context, stream_);
  }
  ~Queue() {
    const Driver& d = driver();
    submitter_.reset();
    if (last_end_) d.cuEventDestroy_v2(last_end_);
    for (CUevent event : events_) d.cuEventDestroy_v2(event);
    if (stream_) d.cuStreamDestroy_v2(stream_);
  }

  Running submit(LilyCommandBuffer* buffer) {
    Running running = {buffer, nullptr, nullptr, 0, {}};
    [buffer startAt:metal::now()];
    if (!usable_ || context_->has_fault()) {
      running.failure = {"the CUDA context was lost (" + context_->fault() + "): SubmissionsIgnored", MTLCommandBufferErrorAccessRevoked};
      return running;
    }
    running.start = event();
    for (auto& pass : buffer->passes) {
      if (!running.failure.text.empty()) break;
      running.failure = submitter_->submit(*pass);
    }
    running.end = event();
    running.mark = submitter_->mark();
    if ((!running.start || !running.end) && running.failure.text.empty())
      running.failure = {"the driver gives no event (" + context_->fault() + ")", MTLCommandBufferErrorInternal};
    return running;
  }

  bool finished(Running& running) {
    if (!running.end) return true;
    CUresult code = context_->note(driver().cuEventQuery(running.end));
    if (code == kNotReady) return false;
    if (code && running.failure.text.empty()) running.failure = failure_of(*context_, code, "a kernel of a command buffer in flight");
    return true;
  }

  void complete(Running& running) {
    CFTimeInterval now = metal::now(), start = now, end = now;
    if (running.start && running.end && !context_->has_fault()) {
      // Times are counted on from event to event: a float of milliseconds is exact only over short distances.
      float gap = 0, length = 0;
      if (last_end_) driver().cuEventElapsedTime(&gap, last_end_, running.start);
      driver().cuEventElapsedTime(&length, running.start, running.end);
      start = last_end_ ? std::max(last_time_ + gap * 1e-3, last_time_) : now - length * 1e-3;
      end = start + length * 1e-3;
      if (last_end_) events_.push_back(last_end_);
      events_.push_back(running.start);
      last_end_ = running.end;
      last_time_ = end;
    }
    submitter_->release_until(running.mark);
    if (!running.failure.text.empty()) [running.buffer failWith:running.failure.text code:running.failure.code];
    [running.buffer completeFrom:start to:end];
    running.buffer = nil;
  }

 private:
  CUevent event() {
    CUevent event = nullptr;
    const Driver& d = driver();
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    } else if (context_->note(d.cuEventCreate(&event, 0))) {
      return nullptr;
    }
    context_->note(d.cuEventRecord(event, stream_));
    return event;
  }

  std::shared_ptr<Context> context_;
  CUstream stream_ = nullptr;
  bool usable_ = false;
  std::unique_ptr<Submitter> submitter_;
  std::vector<CUevent> events_;  // free ones
  CUevent last_end_ = nullptr;
  double last_time_ = 0;
};

// Between two looks at the GPU: nothing at first, so that short work is answered at once, later a nap, so that long work does not
// take a core.
void pause_since(Clock::time_point start) {
  if (Clock::now() - start < std::chrono::milliseconds(2)) {
    for (int i = 0; i < 20; i++) __builtin_ia32_pause();
    return;
  }
  timespec nap = {0, 20000};
  nanosleep(&nap, nullptr);
}

}  // namespace

void run_queue(const std::shared_ptr<Context>& context, metal::QueueState& state) {
  Queue queue(context);
  std::deque<Running> running;
  Clock::time_point since = Clock::now();
  std::unique_lock<std::mutex> lock(state.mutex);
  while (true) {
    @autoreleasepool {
      if (state.pending.size() > running.size() && [state.pending[running.size()] isCommitted]) {
        LilyCommandBuffer* next = state.pending[running.size()];
        lock.unlock();
        running.push_back(queue.submit(next));
        next = nil;
        if (running.size() == 1) since = Clock::now();
        lock.lock();
      } else if (!running.empty()) {
        lock.unlock();
        if (queue.finished(running.front())) {
          lock.lock();
          state.pending.pop_front();
          lock.unlock();
          queue.complete(running.front());
          running.pop_front();
          since = Clock::now();
        } else {
          pause_since(since);
        }
        lock.lock();
      } else if (state.stopping && state.pending.empty()) {
        return;
      } else {
        state.changed.wait(lock);
      }
    }
  }
}

}  // namespace lily::cuda
