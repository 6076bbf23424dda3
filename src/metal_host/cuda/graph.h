// Compute passes as CUDA graphs, instantiated once and launched again.
#pragma once
#include <list>
#include <string>
#include <vector>

#include "kernel.h"

namespace lily::cuda {

struct Node {
  GpuKernel* kernel;
  CUfunction function;
  unsigned grid[3], block[3], shared_bytes, reserved;
  Launch launch;
};

// The dispatches of a pass. Levels follow one another; nothing orders the nodes of one level.
struct Work {
  std::vector<Node> nodes;
  std::vector<size_t> level_ends;
};

// Executable graphs of one stream. A pass that was run before with the same contents is launched as it is; one of the same
// shape (kernels, threadgroups' sizes, levels) may take over the graph of another, whose nodes are then given new contents.
class GraphCache {
 public:
  explicit GraphCache(Context& context) : context_(context) {}
  ~GraphCache() { clear(); }
  CUresult launch(const Work& work, CUstream stream);
  void clear();

 private:
  struct Entry {
    uint64_t shape;
    Work work;
    std::vector<std::shared_ptr<metal::Kernel>> kernels;  // keep the functions loaded
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    std::vector<CUgraphNode> handles;
  };
  CUresult build(const Work& work, Entry& entry);
  CUresult update(const Work& work, Entry& entry);
  static void destroy(Entry& entry);

  Context& context_;
  std::list<Entry> entries_;  // most recently used first
};

}  // namespace lily::cuda
