// A recorded list of dispatches, encoded natively each time it runs.
#pragma once
#import <Metal/Metal.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "library.h"

namespace lily {

struct Binding {
  unsigned index;
  std::shared_ptr<Buffer> buffer;
  size_t offset;
};

struct Dispatch {
  std::shared_ptr<Pipeline> pipeline;
  std::vector<Binding> bindings;
  std::string args;  // bytes of the kernel's args struct; empty = none
  unsigned args_index = 0;
  std::array<size_t, 3> grid, threads;  // threadgroups, threads per threadgroup
  bool barrier_before = false;          // an earlier dispatch must have finished
  double cost_ns = 0;                   // estimated
  std::string label;
  std::vector<std::pair<unsigned, size_t>> threadgroup_memory;  // index, bytes
};

struct RunResult {
  double gpu_ms = 0;
  size_t command_buffers = 0;
};

class Program {
 public:
  Program(std::shared_ptr<Device> device, std::vector<Dispatch> dispatches, bool concurrent);

  // Encodes everything, cut at barriers into command buffers of about max_ms each (long ones are killed by the GPU
  // watchdog), and waits. Throws DeviceError when any of them failed, Interrupted when asked to stop.
  RunResult run(double max_ms, const InterruptCheck& interrupted);
  // Encodes the whole program into one command buffer, which the caller submits.
  void encode(id<MTLCommandBuffer> commands) const { encode(commands, 0, dispatches_.size()); }

  const std::shared_ptr<Device>& device() const { return device_; }
  size_t dispatch_count() const { return dispatches_.size(); }
  size_t barrier_count() const;

 private:
  void encode(id<MTLCommandBuffer> commands, size_t begin, size_t end) const;
  size_t next_cut(size_t begin, double budget_ns, double& cost_ns) const;

  std::shared_ptr<Device> device_;
  std::vector<Dispatch> dispatches_;
  bool concurrent_;
};

}  // namespace lily
