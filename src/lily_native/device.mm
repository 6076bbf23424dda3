#include "device.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <set>

namespace lily {
namespace {

std::mutex devices_mutex;
std::set<Device*>& devices() {
  static auto* all = new std::set<Device*>;  // used at interpreter exit, after static destructors may have run
  return *all;
}

struct Family {
  MTLGPUFamily family;
  const char* name;
};
const Family kFamilies[] = {
    {MTLGPUFamilyApple7, "apple7"}, {MTLGPUFamilyApple8, "apple8"}, {MTLGPUFamilyApple9, "apple9"},
    {static_cast<MTLGPUFamily>(1010), "apple10"},  // by value: the macOS 14 SDK does not name it
    {MTLGPUFamilyMetal3, "metal3"}, {static_cast<MTLGPUFamily>(5002), "metal4"},
};

std::string text(NSString* string) { return string ? [string UTF8String] : ""; }

}  // namespace

std::string describe(NSError* error) {
  if (!error) return "no reason given";
  std::string message = text([error localizedDescription]);
  NSError* cause = [[error userInfo] objectForKey:NSUnderlyingErrorKey];
  if (cause) {
    std::string below = text([cause localizedDescription]);
    if (!below.empty() && message.find(below) == std::string::npos) message += " (" + below + ")";
  }
  return message;
}

std::vector<std::string> Device::names() {
  @autoreleasepool {
    std::vector<std::string> result;
    for (id<MTLDevice> device in MTLCopyAllDevices()) result.push_back(text([device name]));
    return result;
  }
}

Device::Device(std::optional<int> index) : process_(getpid()) {
  @autoreleasepool {
    if (index) {
      NSArray<id<MTLDevice>>* all = MTLCopyAllDevices();
      if (*index < 0 || static_cast<NSUInteger>(*index) >= [all count])
        throw DeviceError("there is no Metal device " + std::to_string(*index) + "; this system has " + std::to_string([all count]));
      metal_ = [all objectAtIndex:static_cast<NSUInteger>(*index)];
    } else {
      metal_ = MTLCreateSystemDefaultDevice();
    }
    if (!metal_)
      throw DeviceError("no Metal device: on a Mac this happens over SSH without a login session, in virtual machines and under Rosetta");
    queue_ = [metal_ newCommandQueue];
    if (!queue_) throw DeviceError("the Metal device gives no command queue");
  }
  std::lock_guard<std::mutex> lock(devices_mutex);
  devices().insert(this);
}

Device::~Device() {
  {
    std::lock_guard<std::mutex> lock(devices_mutex);
    devices().erase(this);
  }
  if (getpid() == process_) drain();
}

std::string Device::name() const {
  @autoreleasepool {
    return text([metal_ name]);
  }
}

DeviceInfo Device::info() const {
  @autoreleasepool {
    DeviceInfo info;
    info.name = text([metal_ name]);
    info.max_threads = [metal_ maxThreadsPerThreadgroup].width;
    info.threadgroup_memory = [metal_ maxThreadgroupMemoryLength];
    info.max_buffer_length = [metal_ maxBufferLength];
    info.working_set = [metal_ recommendedMaxWorkingSetSize];
    info.simd_width = 32;  // every Apple GPU; each pipeline's threadExecutionWidth is checked against it
    info.unified_memory = [metal_ hasUnifiedMemory];
    for (const Family& family : kFamilies)
      if ([metal_ supportsFamily:family.family]) info.families.push_back(family.name);
    // The Metal 4 family is no sign of matrix hardware (an M2 has it), Apple10 is.
    info.tensor_ops = [metal_ supportsFamily:static_cast<MTLGPUFamily>(1010)];
    return info;
  }
}

void Device::check_usable() const {
  if (getpid() != process_) throw DeviceError("a Metal device cannot be used after fork(); load the model in the child process, or start it with 'spawn'");
  std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->lost.empty()) throw DeviceError(state_->lost);
}

id<MTLCommandBuffer> Device::new_command_buffer() {
  check_usable();
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->queue_failed) {  // a fault can leave a queue refusing everything: start a fresh one
      queue_ = [metal_ newCommandQueue];
      state_->queue_failed = false;
    }
  }
  id<MTLCommandBuffer> commands = [queue_ commandBuffer];
  if (!commands) throw DeviceError("the Metal queue gives no command buffer");
  return commands;
}

std::shared_ptr<Submission> Device::submit(id<MTLCommandBuffer> commands) {
  auto submission = std::make_shared<Submission>();
  auto state = state_;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->in_flight++;
  }
  [commands addCompletedHandler:^(id<MTLCommandBuffer> completed) {
    std::string error;
    if ([completed status] != MTLCommandBufferStatusCompleted) {
      error = "the GPU could not finish a command buffer: " + describe([completed error]);
      state->note_failure(error);
    }
    {
      std::lock_guard<std::mutex> lock(submission->mutex);
      submission->error = error;
      submission->gpu_seconds = [completed GPUEndTime] - [completed GPUStartTime];
      submission->completed = true;
    }
    submission->changed.notify_all();
    std::lock_guard<std::mutex> lock(state->mutex);
    state->in_flight--;
    state->idle.notify_all();
  }];
  [commands commit];
  return submission;
}

void DeviceState::note_failure(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex);
  queue_failed = true;
  // The system's answer after repeated faults; it does not recover within the process.
  if (text.find("SubmissionsIgnored") != std::string::npos || text.find("ignored") != std::string::npos)
    lost = "the system refuses further GPU work of this process after repeated faults; restart it";
}

bool Device::wait(Submission& submission, const InterruptCheck& interrupted) {
  std::unique_lock<std::mutex> lock(submission.mutex);
  while (!submission.changed.wait_for(lock, std::chrono::milliseconds(50), [&] { return submission.completed; })) {
    if (!interrupted) continue;
    lock.unlock();
    if (interrupted()) return false;
    lock.lock();
  }
  if (!submission.error.empty()) throw DeviceError(submission.error);
  return true;
}

void Device::drain() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->idle.wait(lock, [&] { return state_->in_flight == 0; });
}

void Device::drain_all() {
  std::lock_guard<std::mutex> lock(devices_mutex);
  for (Device* device : devices())
    if (getpid() == device->process_) device->drain();
}

void Device::observe_cost(double estimated_ns, double gpu_seconds) {
  if (estimated_ns <= 0 || gpu_seconds <= 0) return;
  double measured = gpu_seconds * 1e9 / estimated_ns;
  cost_rate_ = std::clamp(0.5 * (cost_rate_.load() + measured), 1e-3, 1e4);
}

Activity::Activity(const char* reason) {
  @autoreleasepool {
    activity_ = [[NSProcessInfo processInfo] beginActivityWithOptions:NSActivityUserInitiated reason:[NSString stringWithUTF8String:reason]];
  }
}
Activity::~Activity() {
  @autoreleasepool {
    [[NSProcessInfo processInfo] endActivity:activity_];
    activity_ = nil;
  }
}

}  // namespace lily
