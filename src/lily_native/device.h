// One Metal device: its queue, what it can do, and the command buffers that are on their way.
#pragma once
#import <Metal/Metal.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "errors.h"

namespace lily {

struct DeviceInfo {
  std::string name;
  uint64_t max_threads, threadgroup_memory, max_buffer_length, working_set, simd_width;
  std::vector<std::string> families;
  bool tensor_ops, unified_memory;
};

// A committed command buffer. Filled in by its completion handler, on a thread of Metal's.
struct Submission {
  std::mutex mutex;
  std::condition_variable changed;
  bool completed = false;
  std::string error;  // empty: it succeeded
  double gpu_seconds = 0;
};

// What completion handlers share with their device. Not the device itself: a handler runs on a thread of Metal's, where the last
// reference to an object that Python knows must not be dropped (that takes the interpreter's lock, or waits for it for ever
// at exit).
struct DeviceState {
  std::mutex mutex;
  std::condition_variable idle;
  size_t in_flight = 0;
  bool queue_failed = false;
  std::string lost;  // why the device cannot be used any more

  void note_failure(const std::string& text);
};

class Device : public std::enable_shared_from_this<Device> {
 public:
  explicit Device(std::optional<int> index);
  ~Device();

  static std::vector<std::string> names();

  DeviceInfo info() const;
  std::string name() const;
  id<MTLDevice> metal() const { return metal_; }

  // Throws when this process is a fork of the one that opened the device, or the device has failed for good.
  void check_usable() const;

  id<MTLCommandBuffer> new_command_buffer();
  std::shared_ptr<Submission> submit(id<MTLCommandBuffer> commands);
  // Returns false when `interrupted` said so. Throws DeviceError for a failed command buffer.
  bool wait(Submission& submission, const InterruptCheck& interrupted);
  // Blocks until nothing is in flight; reports nothing.
  void drain();
  static void drain_all();  // every device, at interpreter exit

  // GPU time over estimated time of recent command buffers: estimates are made for one GPU and run on any.
  double cost_rate() const { return cost_rate_.load(); }
  void observe_cost(double estimated_ns, double gpu_seconds);

 private:
  id<MTLDevice> metal_;
  id<MTLCommandQueue> queue_;
  pid_t process_;
  std::shared_ptr<DeviceState> state_ = std::make_shared<DeviceState>();
  std::atomic<double> cost_rate_{1.0};
};

// Tells the system that work is being done for a user, so that it does not slow the process down.
class Activity {
 public:
  explicit Activity(const char* reason);
  ~Activity();
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

 private:
  id activity_;
};

}  // namespace lily
