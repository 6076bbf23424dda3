#include "program.h"

#include <deque>
#include <stdexcept>

namespace lily {
namespace {

constexpr unsigned kMaxBindings = 31;     // Metal's buffer argument table
constexpr size_t kMaxArgs = 4096;         // setBytes:
constexpr size_t kSubmissionsAhead = 3;   // one running, one waiting, one being encoded

// What real Metal would drop silently, or abort the process for, is refused when the program is recorded.
void check(const Dispatch& dispatch) {
  auto refuse = [&](const std::string& what) { throw std::invalid_argument("dispatch " + dispatch.label + ": " + what); };
  if (!dispatch.pipeline) refuse("no pipeline");
  size_t threads = dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2];
  if (threads == 0 || dispatch.grid[0] * dispatch.grid[1] * dispatch.grid[2] == 0) refuse("an empty grid or threadgroup");
  if (threads > dispatch.pipeline->max_threads())
    refuse(std::to_string(threads) + " threads per threadgroup, the pipeline allows " + std::to_string(dispatch.pipeline->max_threads()));
  if (dispatch.args.size() > kMaxArgs) refuse("more than 4,096 bytes of arguments");
  if (dispatch.args_index >= kMaxBindings) refuse("arguments at index " + std::to_string(dispatch.args_index));
  for (const Binding& binding : dispatch.bindings) {
    if (binding.index >= kMaxBindings) refuse("buffer index " + std::to_string(binding.index));
    if (!binding.buffer) refuse("no buffer at index " + std::to_string(binding.index));
    if (binding.offset >= binding.buffer->nbytes())
      refuse("offset " + std::to_string(binding.offset) + " is beyond buffer " + binding.buffer->label());
  }
}

MTLSize size(const std::array<size_t, 3>& n) { return MTLSizeMake(n[0], n[1], n[2]); }

}  // namespace

Program::Program(std::shared_ptr<Device> device, std::vector<Dispatch> dispatches, bool concurrent)
    : device_(std::move(device)), dispatches_(std::move(dispatches)), concurrent_(concurrent) {
  for (const Dispatch& dispatch : dispatches_) check(dispatch);
}

size_t Program::barrier_count() const {
  size_t count = 0;
  for (size_t i = 1; i < dispatches_.size(); i++) count += dispatches_[i].barrier_before;
  return count;
}

// D3: one pass in which independent dispatches overlap; only barrier_before orders them.
void Program::encode(id<MTLCommandBuffer> commands, size_t begin, size_t end) const {
  id<MTLComputeCommandEncoder> encoder =
      [commands computeCommandEncoderWithDispatchType:concurrent_ ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial];
  if (!encoder) throw DeviceError("the command buffer gives no compute encoder");
  // Bindings stay set from one dispatch to the next; only what changes is encoded.
  const Pipeline* current = nullptr;
  struct {
    const Buffer* buffer;
    size_t offset;
  } bound[kMaxBindings] = {};
  for (size_t i = begin; i < end; i++) {
    const Dispatch& dispatch = dispatches_[i];
    if (concurrent_ && dispatch.barrier_before && i > begin) [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
    if (dispatch.pipeline.get() != current) {
      current = dispatch.pipeline.get();
      [encoder setComputePipelineState:current->metal()];
    }
    for (const Binding& binding : dispatch.bindings) {
      auto& slot = bound[binding.index];
      if (slot.buffer == binding.buffer.get() && slot.offset == binding.offset) continue;
      slot = {binding.buffer.get(), binding.offset};
      [encoder setBuffer:binding.buffer->metal() offset:binding.offset atIndex:binding.index];
    }
    if (!dispatch.args.empty()) {
      bound[dispatch.args_index] = {};
      [encoder setBytes:dispatch.args.data() length:dispatch.args.size() atIndex:dispatch.args_index];
    }
    for (const auto& [index, bytes] : dispatch.threadgroup_memory) [encoder setThreadgroupMemoryLength:bytes atIndex:index];
    [encoder dispatchThreadgroups:size(dispatch.grid) threadsPerThreadgroup:size(dispatch.threads)];
  }
  [encoder endEncoding];
}

// The end of the command buffer that starts at `begin`: the last barrier within the budget, at least one level.
size_t Program::next_cut(size_t begin, double budget_ns, double& cost_ns) const {
  size_t cut = begin;
  double cost_at_cut = 0;
  cost_ns = 0;
  for (size_t i = begin; i < dispatches_.size(); i++) {
    bool may_cut = i > begin && (dispatches_[i].barrier_before || !concurrent_);
    if (may_cut) {
      if (cut > begin && cost_ns > budget_ns) break;
      cut = i;
      cost_at_cut = cost_ns;
      if (cost_ns > budget_ns) break;
    }
    cost_ns += dispatches_[i].cost_ns;
  }
  bool rest_fits = cost_ns <= budget_ns || cut == begin;
  if (rest_fits) return dispatches_.size();
  cost_ns = cost_at_cut;
  return cut;
}

RunResult Program::run(double max_ms, const InterruptCheck& interrupted) {
  struct InFlight {
    std::shared_ptr<Submission> submission;
    double cost_ns;
  };
  device_->check_usable();
  Activity activity("lily: running a program");
  RunResult result;
  std::deque<InFlight> in_flight;
  std::string failure;
  bool stop = false;
  auto finish_oldest = [&] {
    InFlight oldest = in_flight.front();
    try {
      if (!device_->wait(*oldest.submission, stop ? InterruptCheck() : interrupted)) {
        stop = true;  // still in flight: waited for again, without asking
        return;
      }
      result.gpu_ms += oldest.submission->gpu_seconds * 1e3;
      device_->observe_cost(oldest.cost_ns, oldest.submission->gpu_seconds);
    } catch (const DeviceError& error) {
      if (failure.empty()) failure = error.what();
    }
    in_flight.pop_front();
  };
  for (size_t at = 0; at < dispatches_.size() && failure.empty() && !stop;) {
    double cost_ns = 0;
    size_t end = next_cut(at, max_ms * 1e6 / device_->cost_rate(), cost_ns);
    @autoreleasepool {
      id<MTLCommandBuffer> commands = device_->new_command_buffer();
      encode(commands, at, end);
      in_flight.push_back({device_->submit(commands), cost_ns});
    }
    result.command_buffers++;
    at = end;
    while (in_flight.size() >= kSubmissionsAhead && !stop) finish_oldest();
  }
  while (!in_flight.empty()) finish_oldest();
  if (stop) throw Interrupted();
  if (!failure.empty()) throw DeviceError(failure);
  return result;
}

}  // namespace lily
