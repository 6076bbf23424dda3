// Passes on a stream.
#pragma once
#include "../framework/commands.h"
#include "graph.h"

namespace lily::cuda {

struct Failure {
  std::string text;  // empty: none
  MTLCommandBufferError code = MTLCommandBufferErrorNone;
};

// What a driver's error means for a command buffer.
Failure failure_of(Context& context, CUresult code, const std::string& what);

class Submitter {
 public:
  Submitter(Context& context, CUstream stream) : context_(context), stream_(stream), graphs_(context) {}
  ~Submitter() { release_bytes(); }
  Failure submit(metal::Pass& pass);
  // Pinned copies of setBytes data that launches on their way read; freed by release(mark) when those have ended.
  size_t mark() const { return first_ + bytes_.size(); }
  void release_until(size_t mark);

 private:
  Failure add_node(const metal::Pass& pass, size_t index, Work& work);
  Failure run_levels(metal::Pass& pass);
  void release_bytes() { release_until(mark()); }

  Context& context_;
  CUstream stream_;
  GraphCache graphs_;
  std::deque<void*> bytes_;
  size_t first_ = 0;  // number of the first of them
  Work work_;
};

}  // namespace lily::cuda
