// The compute encoder: checks what Metal's validation layer checks, and records dispatches.
#include <cstring>

#include "commands.h"
#include "settings.h"
#include "support.h"

using namespace lily::metal;

namespace {

struct Slot {
  __unsafe_unretained LilyBuffer* buffer = nil;  // kept by the command buffer
  unsigned char* address = nullptr;              // of the binding, offset included
  NSUInteger offset = 0, length = 0;             // length: from address to the end of the buffer or the bytes
};

}  // namespace

@interface LilyComputeEncoder : NSObject <MTLComputeCommandEncoder> {
 @public
  LilyCommandBuffer* _commandBuffer;
  Pass* _pass;
  MTLDispatchType _dispatchType;
  bool _ended;
  __unsafe_unretained LilyPipeline* _pipeline;  // kept by the command buffer
  Slot _slots[LILY_MAX_BUFFERS];
  uint32_t _threadgroupBytes[LILY_MAX_BUFFERS];
}
@property(copy, atomic) NSString* label;
@end

// Names the place of a mistake: the kernel and, if it has one, the binding.
static std::string at(__unsafe_unretained LilyPipeline* pipeline, const LilyParameter& parameter) {
  return std::string(pipeline->entry->name) + ": buffer " + std::to_string(parameter.index) + " (" + (parameter.name ? parameter.name : "?") + ")";
}

@implementation LilyComputeEncoder
@synthesize dispatchType = _dispatchType;

- (id<MTLDevice>)device {
  return [_commandBuffer device];
}
- (void)requireOpen:(const char*)what {
  if (_ended) programming_error("%s: the encoder was used after endEncoding", what);
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  [self requireOpen:"setComputePipelineState"];
  if (!state) programming_error("setComputePipelineState: the pipeline is nil");
  _pipeline = (LilyPipeline*)state;
  __unsafe_unretained LilyCommandBuffer* commands = _commandBuffer;  // reference counting would be half of the time here
  [commands keep:state by:_pipeline->keeper];
}

- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self requireOpen:"setBuffer"];
  if (index >= LILY_MAX_BUFFERS) programming_error("setBuffer: index %lu, buffers have 0 to %d", index, LILY_MAX_BUFFERS - 1);
  Slot& slot = _slots[index];
  slot = Slot();
  if (!buffer) return;  // unbinds
  __unsafe_unretained LilyBuffer* bound = (LilyBuffer*)buffer;
  if (offset >= bound->size)
    programming_error("setBuffer: offset %lu is beyond the buffer's %lu bytes (index %lu, %s)", offset, bound->size, index,
                      text_of([bound label]).c_str());
  slot.buffer = bound;
  slot.address = bound->address + offset;
  slot.offset = offset;
  slot.length = bound->size - offset;
  __unsafe_unretained LilyCommandBuffer* commands = _commandBuffer;
  [commands keep:bound by:bound->keeper];
}

- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self requireOpen:"setBufferOffset"];
  if (index >= LILY_MAX_BUFFERS || !_slots[index].buffer) programming_error("setBufferOffset: no buffer is bound at index %lu", index);
  [self setBuffer:_slots[index].buffer offset:offset atIndex:index];
}

- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  [self requireOpen:"setBytes"];
  if (index >= LILY_MAX_BUFFERS) programming_error("setBytes: index %lu, buffers have 0 to %d", index, LILY_MAX_BUFFERS - 1);
  if (length > 4096) programming_error("setBytes: %lu bytes at index %lu, at most 4096", length, index);
  if (!bytes || !length) programming_error("setBytes: no bytes at index %lu", index);
  Slot slot;
  slot.address = static_cast<unsigned char*>(_pass->arena.copy(bytes, length));
  slot.length = length;
  _slots[index] = slot;
}

- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  [self requireOpen:"setThreadgroupMemoryLength"];
  if (index >= LILY_MAX_BUFFERS) programming_error("setThreadgroupMemoryLength: index %lu, at most %d", index, LILY_MAX_BUFFERS - 1);
  if (length % 16) programming_error("setThreadgroupMemoryLength: %lu is not a multiple of 16 bytes", length);
  if (length > LILY_THREADGROUP_LIMIT) programming_error("setThreadgroupMemoryLength: %lu exceeds %u bytes", length, LILY_THREADGROUP_LIMIT);
  _threadgroupBytes[index] = static_cast<uint32_t>(length);
}

// Fills in what the kernel's parameters ask for; a binding that the kernel does not have is ignored, as on Metal.
- (void)bind:(LilyDispatch&)dispatch {
  const LilyKernelEntry* entry = _pipeline->entry;
  uint32_t threadgroup_bytes = _pipeline->kernel->static_bytes;
  for (uint32_t i = 0; i < entry->parameter_count; i++) {
    const LilyParameter& parameter = entry->parameters[i];
    if (parameter.kind == LILY_PARAMETER_THREADGROUP) {
      uint32_t length = _threadgroupBytes[parameter.index];
      if (!length) programming_error("%s: threadgroup memory %u has no length", entry->name, parameter.index);
      dispatch.threadgroup_bytes[parameter.index] = length;
      threadgroup_bytes += length;
      continue;
    }
    const Slot& slot = _slots[parameter.index];
    if (!slot.address) programming_error("%s is not bound", at(_pipeline, parameter).c_str());
    if (parameter.element_align > 1 && reinterpret_cast<size_t>(slot.address) % parameter.element_align)
      programming_error("%s: offset %lu is not a multiple of %u bytes, the alignment of its type", at(_pipeline, parameter).c_str(), slot.offset,
                        parameter.element_align);
    if (slot.length < parameter.element_size)
      programming_error("%s: %lu bytes from the offset to the end, the type has %u", at(_pipeline, parameter).c_str(), slot.length,
                        parameter.element_size);
    if (parameter.writable && !slot.buffer) programming_error("%s is written by the kernel but was set with setBytes", at(_pipeline, parameter).c_str());
    dispatch.buffers[parameter.index] = {slot.address, slot.length};
    if (slot.buffer) _pass->touch(slot.buffer, parameter.writable);
    else _pass->sources.back().bytes_mask |= 1u << parameter.index;
  }
  if (threadgroup_bytes > LILY_THREADGROUP_LIMIT)
    programming_error("%s: %u bytes of threadgroup memory (static and dynamic), at most %u", entry->name, threadgroup_bytes, LILY_THREADGROUP_LIMIT);
}

- (LilyDispatch&)recordGroups:(MTLSize)groups threads:(MTLSize)threads grid:(MTLSize)grid named:(const char*)what {
  [self requireOpen:what];
  if (!_pipeline) programming_error("%s: no pipeline state was set", what);
  const char* name = _pipeline->entry->name;
  if (!threads.width || !threads.height || !threads.depth) programming_error("%s: %s: threads per threadgroup contain a 0", what, name);
  NSUInteger total = threads.width * threads.height * threads.depth;
  if (total > _pipeline->kernel->max_threads)  // Apple's driver drops such a dispatch silently; here it is heard
    programming_error("%s: %s: %lu threads per threadgroup, the pipeline's maxTotalThreadsPerThreadgroup is %u", what, name, total,
                      _pipeline->kernel->max_threads);
  if (!grid.width || !grid.height || !grid.depth) programming_error("%s: %s: the grid contains a 0", what, name);
  _pass->dispatches.emplace_back();
  LilyDispatch& dispatch = _pass->dispatches.back();
  _pass->sources.push_back({_pipeline->kernel.get(), 0});
  dispatch.module = _pipeline->kernel->module;
  dispatch.entry = _pipeline->entry_index;
  const MTLSize* sizes[3] = {&groups, &threads, &grid};
  uint32_t* fields[3] = {dispatch.groups, dispatch.threads, dispatch.grid};
  for (int i = 0; i < 3; i++) {
    fields[i][0] = static_cast<uint32_t>(sizes[i]->width);
    fields[i][1] = static_cast<uint32_t>(sizes[i]->height);
    fields[i][2] = static_cast<uint32_t>(sizes[i]->depth);
  }
  dispatch.constants = _pipeline->constants.empty() ? nullptr : _pipeline->constants.data();
  [self bind:dispatch];
  return dispatch;
}
// In a serial encoder every dispatch waits for the one before.
- (void)finishDispatch {
  if (_dispatchType == MTLDispatchTypeSerial) _pass->end_level();
}

- (void)dispatchThreadgroups:(MTLSize)groups threadsPerThreadgroup:(MTLSize)threads {
  MTLSize grid = MTLSizeMake(groups.width * threads.width, groups.height * threads.height, groups.depth * threads.depth);
  [self recordGroups:groups threads:threads grid:grid named:"dispatchThreadgroups"];
  [self finishDispatch];
}

- (void)dispatchThreads:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
  auto count = [](NSUInteger n, NSUInteger step) { return step ? (n + step - 1) / step : 0; };
  MTLSize groups = MTLSizeMake(count(grid.width, threads.width), count(grid.height, threads.height), count(grid.depth, threads.depth));
  [self recordGroups:groups threads:threads grid:grid named:"dispatchThreads"];
  [self finishDispatch];
}

- (void)dispatchThreadgroupsWithIndirectBuffer:(id<MTLBuffer>)buffer
                          indirectBufferOffset:(NSUInteger)offset
                         threadsPerThreadgroup:(MTLSize)threads {
  const char* what = "dispatchThreadgroupsWithIndirectBuffer";
  [self requireOpen:what];
  LilyBuffer* source = (LilyBuffer*)buffer;
  if (!source) programming_error("%s: the buffer is nil", what);
  if (offset % 4) programming_error("%s: offset %lu is not a multiple of 4", what, offset);
  if (offset + sizeof(MTLDispatchThreadgroupsIndirectArguments) > source->size) programming_error("%s: offset %lu is beyond the buffer", what, offset);
  [_commandBuffer keep:source by:source->keeper];
  _pass->touch(source, false);
  [self recordGroups:MTLSizeMake(1, 1, 1) threads:threads grid:threads named:what];  // the counts are read when its level starts
  _pass->indirect.emplace_back(_pass->dispatches.size() - 1, reinterpret_cast<const uint32_t*>(source->address + offset));
  [self finishDispatch];
}

- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self requireOpen:"memoryBarrierWithScope"];
  if (!(scope & MTLBarrierScopeBuffers)) programming_error("memoryBarrierWithScope: the scope does not hold MTLBarrierScopeBuffers");
  _pass->end_level();
}

// Orders everything, not only the named resources: stricter than Metal, so it hides a barrier on the wrong resource.
- (void)memoryBarrierWithResources:(const id<MTLResource> __unsafe_unretained[])resources count:(NSUInteger)count {
  [self requireOpen:"memoryBarrierWithResources"];
  if (!resources || !count) programming_error("memoryBarrierWithResources: no resources");
  _pass->end_level();
}

- (void)endEncoding {
  [self requireOpen:"endEncoding"];
  _pass->end_level();
  _ended = true;
  _commandBuffer->encoder_open = false;
}

- (void)dealloc {
  if (!_ended) programming_error("a compute encoder was released before endEncoding");
}
@end

namespace lily::metal {
id<MTLComputeCommandEncoder> new_compute_encoder(LilyCommandBuffer* buffer, MTLDispatchType type) {
  LilyComputeEncoder* encoder = [LilyComputeEncoder new];
  encoder->_commandBuffer = buffer;
  encoder->_dispatchType = type;
  encoder->_pass = &add_pass(buffer);
  return encoder;
}
}  // namespace lily::metal
