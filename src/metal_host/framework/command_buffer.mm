// Command buffers: one-shot lists of passes with a status, an error and handlers.
#include <time.h>

#include <atomic>

#include "commands.h"
#include "support.h"

using namespace lily::metal;

NSErrorDomain const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

@implementation LilyCommandBuffer {
 @public
  id<MTLCommandQueue> _commandQueue;
  std::mutex _mutex;
  std::condition_variable _changed;
  std::atomic<NSUInteger> _status;
  bool _handlersDone, _counted;
  NSError* _error;
  CFTimeInterval _gpuStart, _gpuEnd;
  std::vector<MTLCommandBufferHandler> _scheduledHandlers, _completedHandlers;
  std::vector<id> _kept;
}
@synthesize commandQueue = _commandQueue;

- (id<MTLDevice>)device {
  return [_commandQueue device];
}
- (BOOL)retainedReferences {
  return keeps_references;
}
- (MTLCommandBufferStatus)status {
  return static_cast<MTLCommandBufferStatus>(_status.load());
}
- (NSError*)error {
  std::lock_guard<std::mutex> lock(_mutex);
  return _error;
}
- (CFTimeInterval)GPUStartTime {
  return _gpuStart;
}
- (CFTimeInterval)GPUEndTime {
  return _gpuEnd;
}

- (void)keep:(id)object by:(std::atomic<uint64_t>&)keeper {
  // When two command buffers are encoded at the same time, an object may be kept twice; never not at all.
  if (!keeps_references || keeper.load(std::memory_order_relaxed) == number) return;
  keeper.store(number, std::memory_order_relaxed);
  _kept.push_back(object);
}

- (void)requireEncodable:(const char*)what {
  if (_status.load() >= MTLCommandBufferStatusCommitted) programming_error("%s: the command buffer was committed already", what);
  if (encoder_open) programming_error("%s: the previous encoder was not ended", what);
  encoder_open = true;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [self computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  [self requireEncodable:"computeCommandEncoder"];
  return new_compute_encoder(self, type);
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  [self requireEncodable:"blitCommandEncoder"];
  return new_blit_encoder(self);
}

- (void)addScheduledHandler:(MTLCommandBufferHandler)handler {
  if (_status.load() >= MTLCommandBufferStatusCommitted) programming_error("addScheduledHandler: the command buffer was committed already");
  _scheduledHandlers.push_back(handler);
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler {
  if (_status.load() >= MTLCommandBufferStatusCommitted) programming_error("addCompletedHandler: the command buffer was committed already");
  _completedHandlers.push_back(handler);
}

- (void)enqueue {
  if (_status.load() != MTLCommandBufferStatusNotEnqueued) programming_error("enqueue: the command buffer was enqueued or committed already");
  _status = MTLCommandBufferStatusEnqueued;
  std::lock_guard<std::mutex> lock(queue_state->mutex);
  queue_state->pending.push_back(self);
}

- (void)commit {
  if (_status.load() >= MTLCommandBufferStatusCommitted) programming_error("commit: the command buffer was committed already");
  if (encoder_open) programming_error("commit: an encoder was not ended");
  {
    std::lock_guard<std::mutex> lock(queue_state->mutex);
    if (_status.load() == MTLCommandBufferStatusNotEnqueued) queue_state->pending.push_back(self);
    _status = MTLCommandBufferStatusCommitted;
  }
  queue_state->changed.notify_all();
}

- (void)waitUntilScheduled {
  if (_status.load() < MTLCommandBufferStatusCommitted) programming_error("waitUntilScheduled: not committed, would wait for ever");
  std::unique_lock<std::mutex> lock(_mutex);
  _changed.wait(lock, [&] { return _status.load() >= MTLCommandBufferStatusScheduled; });
}
- (void)waitUntilCompleted {
  if (_status.load() < MTLCommandBufferStatusCommitted) programming_error("waitUntilCompleted: not committed, would wait for ever");
  std::unique_lock<std::mutex> lock(_mutex);
  _changed.wait(lock, [&] { return _handlersDone; });
}

// ---- the queue's side

- (BOOL)isCommitted {
  return _status.load() >= MTLCommandBufferStatusCommitted;
}
- (void)startAt:(CFTimeInterval)time {
  if (_status.load() >= MTLCommandBufferStatusScheduled) return;
  {
    std::lock_guard<std::mutex> lock(_mutex);
    _gpuStart = time;
    _status = MTLCommandBufferStatusScheduled;
  }
  _changed.notify_all();
  for (MTLCommandBufferHandler handler : _scheduledHandlers) handler(self);
  _scheduledHandlers.clear();
}
- (void)failWith:(const std::string&)text code:(MTLCommandBufferError)code {
  std::lock_guard<std::mutex> lock(_mutex);
  NSError* cause = make_error(@"LilySoftwareMetal", 1, text);
  id keys[] = {NSLocalizedDescriptionKey, NSUnderlyingErrorKey};
  id objects[] = {lily::metal::string("Internal Error (0000000e:" + text + ")"), cause};
  _error = [NSError errorWithDomain:MTLCommandBufferErrorDomain
                               code:code
                           userInfo:[NSDictionary dictionaryWithObjects:objects forKeys:keys count:2]];
}
- (BOOL)hasFailed {
  std::lock_guard<std::mutex> lock(_mutex);
  return _error != nil;
}
- (void)completeAt:(CFTimeInterval)time {
  [self startAt:time];  // a command buffer without passes starts and ends at once
  [self completeFrom:_gpuStart to:time];
}
- (void)completeFrom:(CFTimeInterval)start to:(CFTimeInterval)end {
  {
    std::lock_guard<std::mutex> lock(_mutex);
    _gpuStart = start;
    _gpuEnd = end;
    _status = _error ? MTLCommandBufferStatusError : MTLCommandBufferStatusCompleted;
  }
  {
    std::lock_guard<std::mutex> lock(queue_state->mutex);
    for (auto& pass : passes)
      if (queue_state->spare.size() < 4 && pass->dispatches.capacity() > 16) queue_state->spare.push_back(std::move(pass->dispatches));
  }
  passes.clear();
  _kept.clear();
  // waitUntilCompleted returns after the handlers have run, as on Metal.
  for (MTLCommandBufferHandler handler : _completedHandlers) handler(self);
  _completedHandlers.clear();
  [self uncount];
  {
    std::lock_guard<std::mutex> lock(_mutex);
    _handlersDone = true;
  }
  _changed.notify_all();
}
- (void)uncount {
  if (!_counted) return;
  _counted = false;
  {
    std::lock_guard<std::mutex> lock(queue_state->mutex);
    queue_state->outstanding--;
  }
  queue_state->changed.notify_all();
}
- (void)dealloc {
  [self uncount];
}
@end

namespace lily::metal {

CFTimeInterval now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

Pass& add_pass(LilyCommandBuffer* buffer) {
  auto pass = std::make_unique<Pass>();
  QueueState& state = *buffer->queue_state;
  std::lock_guard<std::mutex> lock(state.mutex);
  pass->ordered = state.ordered;
  if (!state.spare.empty()) {
    pass->dispatches = std::move(state.spare.back());
    pass->dispatches.clear();
    state.spare.pop_back();
  }
  buffer->passes.push_back(std::move(pass));
  return *buffer->passes.back();
}

LilyCommandBuffer* new_command_buffer(id<MTLCommandQueue> queue, std::shared_ptr<QueueState> state, bool keeps_references) {
  {
    // A queue has room for 64 command buffers that have not completed; making one more waits.
    std::unique_lock<std::mutex> lock(state->mutex);
    state->changed.wait(lock, [&] { return state->outstanding < state->limit; });
    state->outstanding++;
  }
  static std::atomic<uint64_t> made{0};
  LilyCommandBuffer* buffer = [LilyCommandBuffer new];
  buffer->number = ++made;
  buffer->_commandQueue = queue;
  buffer->queue_state = std::move(state);
  buffer->keeps_references = keeps_references;
  buffer->_counted = true;
  return buffer;
}

}  // namespace lily::metal
