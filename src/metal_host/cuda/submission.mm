#include "submission.h"

#include <cstring>

namespace lily::cuda {

using metal::BlitOperation;
using metal::Pass;

Failure failure_of(Context& context, CUresult code, const std::string& what) {
  if (code == kSuccess) return {};
  bool lost_before = context.has_fault();
  context.note(code);
  std::string text = what + ": " + driver().describe(code);
  if (lost_before) return {text, MTLCommandBufferErrorAccessRevoked};
  switch (code) {
    case kOutOfMemory: return {text, MTLCommandBufferErrorOutOfMemory};
    case 700: case 716: case 717: case 718: return {text, MTLCommandBufferErrorPageFault};
    case 702: return {text, MTLCommandBufferErrorTimeout};
    default: return {text, MTLCommandBufferErrorInternal};
  }
}

static CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Appends the launch of one dispatch.
Failure Submitter::add_node(const Pass& pass, size_t index, Work& work) {
  const LilyDispatch& dispatch = pass.dispatches[index];
  auto* kernel = static_cast<GpuKernel*>(pass.sources[index].kernel);
  const LilyKernelEntry& entry = kernel->entry();
  bool ragged = dispatch.threads[0] * dispatch.threads[1] * dispatch.threads[2] % 32 != 0;
  for (int axis = 0; axis < 3; axis++) ragged = ragged || dispatch.grid[axis] % dispatch.threads[axis] != 0;
  std::string error;
  CUfunction function = kernel->function(ragged, error);
  if (!function) return {std::string(entry.name) + ": " + error, MTLCommandBufferErrorInternal};
  if (dispatch.groups[1] > 65535 || dispatch.groups[2] > 65535 || dispatch.threads[2] > 64)
    return {std::string(entry.name) + ": CUDA launches at most 65,535 threadgroups along y and z, and 64 threads along z",
            MTLCommandBufferErrorInvalidResource};
  Node& node = work.nodes.emplace_back();
  memset(&node, 0, sizeof node);
  node.kernel = kernel;
  node.function = function;
  memcpy(node.grid, dispatch.groups, sizeof node.grid);
  memcpy(node.block, dispatch.threads, sizeof node.block);
  memcpy(node.launch.grid_threads, dispatch.grid, sizeof node.launch.grid_threads);
  memcpy(node.launch.grid_groups, dispatch.groups, sizeof node.launch.grid_groups);
  uint32_t in_bytes = pass.sources[index].bytes_mask;
  for (const InlinePlace& place : kernel->places()) {
    if (!(in_bytes >> place.index & 1)) continue;
    memcpy(node.launch.bytes + place.offset, dispatch.buffers[place.index].address, place.size);
    node.launch.inline_mask |= 1u << place.index;
  }
  for (uint32_t i = 0; i < entry.parameter_count; i++) {
    const LilyParameter& parameter = entry.parameters[i];
    if (parameter.kind == LILY_PARAMETER_THREADGROUP) {
      node.launch.threadgroup_offset[parameter.index] = node.shared_bytes;
      node.shared_bytes += dispatch.threadgroup_bytes[parameter.index];
      continue;
    }
    uint32_t bit = 1u << parameter.index;
    if (node.launch.inline_mask & bit) continue;
    const LilyBinding& binding = dispatch.buffers[parameter.index];
    void* address = binding.address;
    if (in_bytes & bit) {  // bytes that the kernel reads through a pointer
      if (CUresult code = driver().cuMemHostAlloc(&address, binding.length, kHostPortable | kHostDeviceMap))
        return failure_of(context_, code, "memory for setBytes");
      memcpy(address, binding.address, binding.length);
      bytes_.push_back(address);
    }
    node.launch.buffer[parameter.index] = address_of(address);
  }
  return {};
}

void Submitter::release_until(size_t mark) {
  for (; first_ < mark && !bytes_.empty(); first_++) {
    driver().cuMemFreeHost(bytes_.front());
    bytes_.pop_front();
  }
}

// A pass with counts that the GPU computes: a CUDA launch takes its counts from the CPU, so every level waits for the one before.
Failure Submitter::run_levels(Pass& pass) {
  const Driver& d = driver();
  size_t begin = 0, next = 0;
  for (size_t end : pass.level_ends) {
    if (CUresult code = context_.note(d.cuStreamSynchronize(stream_))) return failure_of(context_, code, "a kernel");
    for (; next < pass.indirect.size() && pass.indirect[next].first < end; next++) {
      LilyDispatch& dispatch = pass.dispatches[pass.indirect[next].first];
      CUresult code = d.cuMemcpyDtoH_v2(dispatch.groups, address_of(pass.indirect[next].second), sizeof dispatch.groups);
      if (code) return failure_of(context_, code, "indirect counts");
      for (int axis = 0; axis < 3; axis++) dispatch.grid[axis] = dispatch.groups[axis] * dispatch.threads[axis];
    }
    Work level;
    for (size_t i = begin; i < end; i++) {
      const uint32_t* groups = pass.dispatches[i].groups;
      if (!groups[0] || !groups[1] || !groups[2]) continue;
      Failure failure = add_node(pass, i, level);
      if (!failure.text.empty()) return failure;
    }
    level.level_ends = {level.nodes.size()};
    if (!level.nodes.empty())
      if (CUresult code = graphs_.launch(level, stream_)) return failure_of(context_, code, "launch");
    begin = end;
  }
  return {};
}

Failure Submitter::submit(Pass& pass) {
  const Driver& d = driver();
  for (const BlitOperation& blit : pass.blits) {
    CUresult code = blit.source ? d.cuMemcpyAsync(address_of(blit.destination), address_of(blit.source), blit.length, stream_)
                                : d.cuMemsetD8Async(address_of(blit.destination), blit.value, blit.length, stream_);
    if (context_.note(code)) return failure_of(context_, code, blit.source ? "copy" : "fill");
  }
  if (!pass.indirect.empty()) return run_levels(pass);
  if (pass.dispatches.empty()) return {};
  work_.nodes.clear();
  work_.nodes.reserve(pass.dispatches.size());
  work_.level_ends = pass.level_ends;
  for (size_t i = 0; i < pass.dispatches.size(); i++) {
    Failure failure = add_node(pass, i, work_);
    if (!failure.text.empty()) return failure;
  }
  if (work_.nodes.size() > 1) return failure_of(context_, graphs_.launch(work_, stream_), "launch");
  Node& n = work_.nodes[0];
  void* arguments[] = {&n.launch};
  CUresult code = d.cuLaunchKernel(n.function, n.grid[0], n.grid[1], n.grid[2], n.block[0], n.block[1], n.block[2], n.shared_bytes, stream_, arguments,
                                   nullptr);
  return failure_of(context_, code, "launch");
}

}  // namespace lily::cuda
