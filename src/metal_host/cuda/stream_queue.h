// A command queue as a CUDA stream.
#pragma once
#include <memory>

#include "context.h"

namespace lily::metal {
struct QueueState;
}
namespace lily::cuda {

// The body of the queue's thread: puts committed command buffers on the stream in their order and completes them when the GPU
// is done with them.
void run_queue(const std::shared_ptr<Context>& context, metal::QueueState& state);

}  // namespace lily::cuda
