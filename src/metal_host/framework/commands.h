// What encoders record and a queue runs.
#pragma once
#import <Metal/Metal.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "../simt/engine.h"
#include "buffer.h"
#include "library.h"

namespace lily::metal {

// Bytes given to setBytes: they must stay where they are until the pass has run.
class Arena {
 public:
  void* copy(const void* bytes, size_t length);

 private:
  std::vector<std::unique_ptr<unsigned char[]>> blocks_;
  size_t used_ = 0, capacity_ = 0;
};

struct BlitOperation {
  unsigned char* destination;
  const unsigned char* source;  // null: fill
  size_t length;
  uint8_t value;
};

struct BufferSpan {
  uint64_t end;  // address
  std::string label;
};

// What a dispatch runs, and which of its bindings came from setBytes (bit i: index i).
struct DispatchSource {
  Kernel* kernel;  // kept by the command buffer
  uint32_t bytes_mask;
};

// The commands of one encoder. A compute pass is a list of levels: nothing orders the dispatches of one level.
struct Pass {
  std::vector<LilyDispatch> dispatches;
  std::vector<DispatchSource> sources;                         // of each dispatch
  std::vector<size_t> level_ends;                              // one past the last dispatch of each level
  std::vector<std::pair<size_t, const uint32_t*>> indirect;    // dispatch, where its group counts will lie
  std::vector<BlitOperation> blits;
  Arena arena;
  bool ordered = false;  // its queue runs passes in their order anyway, so what they touch need not be known
  // Tracked buffers that the pass touches, and whether it writes them: what Metal orders passes by.
  std::unordered_map<const void*, bool> tracked;
  std::map<uint64_t, BufferSpan> buffers;  // by address, what dispatches bind; filled when hazards=on
  bool done = false;

  void touch(LilyBuffer* buffer, bool writes) {
    if (!ordered) note_touch(buffer, writes);
  }
  void note_touch(LilyBuffer* buffer, bool writes);
  bool conflicts_with(const Pass& other) const;
  void end_level();
};

// On the CPU: runs the pass on the calling thread and the engine's workers. Returns the engine's message on a fault.
std::string run_pass(Pass& pass);

struct QueueState;

}  // namespace lily::metal

@interface LilyCommandBuffer : NSObject <MTLCommandBuffer> {
 @public
  std::vector<std::unique_ptr<lily::metal::Pass>> passes;
  std::shared_ptr<lily::metal::QueueState> queue_state;
  bool encoder_open, keeps_references;
  uint64_t number;  // of this process's command buffers, from 1
}
@property(copy, atomic) NSString* label;
- (void)keep:(id)object by:(std::atomic<uint64_t>&)keeper;  // until the command buffer has completed; keeper belongs to the object
// Called by the queue's thread.
- (BOOL)isCommitted;
- (void)startAt:(CFTimeInterval)time;
- (void)failWith:(const std::string&)text code:(MTLCommandBufferError)code;
- (BOOL)hasFailed;
- (void)completeAt:(CFTimeInterval)time;
- (void)completeFrom:(CFTimeInterval)start to:(CFTimeInterval)end;  // where the start is known only afterwards
@end

namespace lily::metal {

// A queue's thread works on this, not on the queue object, so that the object may die while the thread ends.
struct QueueState {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<LilyCommandBuffer*> pending;  // enqueued, in order
  size_t outstanding = 0, limit = 64;      // command buffers made and not completed
  bool stopping = false;
  std::mt19937_64 random;
  bool ordered = false;                                  // see Pass
  std::vector<std::vector<LilyDispatch>> spare;          // memory of completed passes: large, and wanted again at every step
};
void run_queue(std::shared_ptr<QueueState> state);  // of the CPU
CFTimeInterval now();

LilyCommandBuffer* new_command_buffer(id<MTLCommandQueue> queue, std::shared_ptr<QueueState> state, bool keeps_references) NS_RETURNS_RETAINED;
Pass& add_pass(LilyCommandBuffer* buffer);
id<MTLComputeCommandEncoder> new_compute_encoder(LilyCommandBuffer* buffer, MTLDispatchType type) NS_RETURNS_RETAINED;
id<MTLBlitCommandEncoder> new_blit_encoder(LilyCommandBuffer* buffer) NS_RETURNS_RETAINED;
id<MTLCommandQueue> new_queue(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, NSUInteger limit) NS_RETURNS_RETAINED;

}  // namespace lily::metal
