// Command queues: a thread each, which runs committed command buffers one after the other. run_queue is the CPU's.
//
// Metal lets passes overlap when no tracked resource orders them. With order=reverse or order=random this queue shows it:
// a pass may run before earlier ones that it has no tracked conflict with, of its own or of an earlier command buffer.
// Completion is still reported in the order of commits.
#include <chrono>

#include "commands.h"
#include "settings.h"
#include "support.h"

namespace lily::metal {
namespace {

struct Choice {
  __strong LilyCommandBuffer* buffer;
  Pass* pass;
};

// Passes that nothing orders after an earlier pass that has not run. In a forward run only the first pass.
std::vector<Choice> ready_passes(const QueueState& state, bool reorders) {
  constexpr size_t kWindow = 16;  // how far ahead a GPU would look, about
  std::vector<Choice> ready;
  std::vector<Pass*> waiting;
  for (LilyCommandBuffer* buffer : state.pending) {
    if (![buffer isCommitted]) break;  // holds its place in the order
    for (auto& pass : buffer->passes) {
      if (pass->done) continue;
      bool blocked = false;
      for (Pass* earlier : waiting) blocked = blocked || pass->conflicts_with(*earlier);
      if (!blocked) ready.push_back({buffer, pass.get()});
      waiting.push_back(pass.get());
      if (!reorders || waiting.size() >= kWindow) return ready;
    }
  }
  return ready;
}

bool is_finished(LilyCommandBuffer* buffer) {
  if (![buffer isCommitted]) return false;
  if ([buffer hasFailed]) return true;  // what follows a fault in its command buffer is not run
  for (auto& pass : buffer->passes)
    if (!pass->done) return false;
  return true;
}

// faults=N: what a watchdog does to a command buffer, before or after this pass had its effect.
enum class Injected { kNone, kBefore, kAfter };

Injected injected_fault(QueueState& state) {
  const uint64_t rate = settings().faults;
  if (!rate || state.random() % rate) return Injected::kNone;
  return state.random() % 2 ? Injected::kBefore : Injected::kAfter;
}

void run_choice(const Choice& choice, Injected injected) {
  [choice.buffer startAt:now()];
  std::string fault = injected == Injected::kBefore ? "" : run_pass(*choice.pass);
  choice.pass->done = true;
  if (fault.empty() && injected != Injected::kNone) {
    [choice.buffer failWith:"an injected fault" code:MTLCommandBufferErrorTimeout];
    return;
  }
  if (!fault.empty()) [choice.buffer failWith:fault code:MTLCommandBufferErrorInternal];
}

// Takes finished command buffers off the front. Handlers run without the lock.
void complete_finished(QueueState& state, std::unique_lock<std::mutex>& lock) {
  while (!state.pending.empty() && is_finished(state.pending.front())) {
    LilyCommandBuffer* buffer = state.pending.front();
    state.pending.pop_front();
    lock.unlock();
    [buffer completeAt:now()];
    buffer = nil;
    lock.lock();
  }
}

}  // namespace

void run_queue(std::shared_ptr<QueueState> state) {
  const bool reorders = settings().reorders();
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    @autoreleasepool {
      complete_finished(*state, lock);
      std::vector<Choice> ready = ready_passes(*state, reorders);
      if (ready.empty()) {
        if (state->stopping && state->pending.empty()) return;
        state->changed.wait(lock);
        continue;
      }
      if (reorders && state->pending.size() == 1) {  // give the next command buffer a chance to overtake
        state->changed.wait_for(lock, std::chrono::microseconds(200), [&] { return state->pending.size() > 1; });
        ready = ready_passes(*state, reorders);
      }
      size_t pick = 0;
      if (settings().order == LILY_ORDER_REVERSE) pick = ready.size() - 1;
      if (settings().order == LILY_ORDER_RANDOM) pick = state->random() % ready.size();
      Choice choice = ready[pick];
      Injected injected = injected_fault(*state);
      ready.clear();
      lock.unlock();
      run_choice(choice, injected);
      lock.lock();
    }
  }
}

}  // namespace lily::metal

using namespace lily::metal;

@interface LilyQueue : NSObject <MTLCommandQueue> {
 @public
  id<MTLDevice> _device;
  std::shared_ptr<QueueState> _state;
  std::thread _thread;
}
@property(copy, atomic) NSString* label;
@end

@implementation LilyQueue
@synthesize device = _device;
- (id<MTLCommandBuffer>)commandBuffer {
  return new_command_buffer(self, _state, true);
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return new_command_buffer(self, _state, false);
}
// Every command buffer holds its queue, so none is pending here.
- (void)dealloc {
  {
    std::lock_guard<std::mutex> lock(_state->mutex);
    _state->stopping = true;
  }
  _state->changed.notify_all();
  // The last command buffer may be released by the thread itself.
  if (_thread.get_id() == std::this_thread::get_id()) _thread.detach();
  else _thread.join();
}
@end

namespace lily::metal {
id<MTLCommandQueue> new_queue(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, NSUInteger limit) {
  if (!backend->prepare_queue().empty()) return nil;
  LilyQueue* queue = [LilyQueue new];
  queue->_device = device;
  queue->_state = std::make_shared<QueueState>();
  queue->_state->limit = limit;
  queue->_state->ordered = backend->runs_in_order();
  queue->_state->random.seed(settings().seed);
  queue->_thread = std::thread([backend, state = queue->_state] { backend->run_queue(state); });
  return queue;
}
}  // namespace lily::metal
