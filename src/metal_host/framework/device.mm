// A device: a backend that passes for an Apple GPU of the family that LILY_METAL_HOST asks for.
#include <map>

#include "../cuda/devices.h"
#include "buffer.h"
#include "commands.h"
#include "library.h"
#include "settings.h"
#include "support.h"

using namespace lily::metal;

@interface LilyDevice : NSObject <MTLDevice> {
 @public
  std::shared_ptr<Backend> backend;
  uint64_t number;
}
@end

@implementation LilyDevice
- (NSString*)name {
  return lily::metal::string(backend->name());
}
- (uint64_t)registryID {
  return number;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(LILY_MAX_THREADS, LILY_MAX_THREADS, LILY_MAX_THREADS);
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return LILY_THREADGROUP_LIMIT;
}
- (NSUInteger)maxBufferLength {
  return backend->max_buffer_length();
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return backend->working_set();
}
- (NSUInteger)currentAllocatedSize {
  return backend->allocated();
}
- (BOOL)hasUnifiedMemory {
  return backend->unified_memory();
}
- (BOOL)isLowPower {
  return NO;
}
- (BOOL)isHeadless {
  return YES;
}
- (BOOL)isRemovable {
  return NO;
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
  int apple = settings().family;
  if (family >= MTLGPUFamilyApple1 && family <= MTLGPUFamilyApple10) return family - MTLGPUFamilyApple1 < apple;
  switch (family) {
    case MTLGPUFamilyMetal3:
    case MTLGPUFamilyMetal4:  // true on an M1 too, so it says nothing about tensor operations
    case MTLGPUFamilyMac2:
      return apple >= 7;
    case MTLGPUFamilyCommon1:
    case MTLGPUFamilyCommon2:
    case MTLGPUFamilyCommon3:
      return YES;
    default:
      return NO;
  }
}
- (id<MTLCommandQueue>)newCommandQueue {
  return new_queue(self, backend, 64);
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)count {
  if (!count) programming_error("newCommandQueueWithMaxCommandBufferCount: 0");
  return new_queue(self, backend, count);
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  return new_buffer(self, backend, length, options, nullptr);
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)bytes length:(NSUInteger)length options:(MTLResourceOptions)options {
  if (!bytes) programming_error("newBufferWithBytes: no bytes");
  return new_buffer(self, backend, length, options, bytes);
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  return new_buffer_no_copy(self, backend, pointer, length, options, deallocator);
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError* __autoreleasing*)error {
  if (!source) programming_error("newLibraryWithSource: the source is nil");
  return new_library(self, backend, source, options, error);
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError* __autoreleasing*)error {
  return new_pipeline(backend, function, error);
}
@end

// One object stands for a device as long as anybody holds it.
static LilyDevice* shared_device(uint64_t number, std::shared_ptr<Backend> backend) NS_RETURNS_RETAINED {
  static std::mutex mutex;
  static auto& shared = *new std::map<uint64_t, __weak LilyDevice*>;  // no destructor at exit
  std::lock_guard<std::mutex> lock(mutex);
  LilyDevice* device = shared[number];
  if (!device) {
    device = [LilyDevice new];
    device->backend = std::move(backend);
    device->number = number;
    shared[number] = device;
  }
  return device;
}

id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  settings();  // a malformed LILY_METAL_HOST is reported now
  return shared_device(1, cpu_backend());
}

NSArray<id<MTLDevice>>* MTLCopyAllDevices(void) {
  std::vector<id> devices = {MTLCreateSystemDefaultDevice()};
  for (const auto& backend : lily::cuda::backends()) devices.push_back(shared_device(devices.size() + 1, backend));
  std::vector<id __unsafe_unretained> pointers(devices.begin(), devices.end());
  return [NSArray arrayWithObjects:pointers.data() count:pointers.size()];
}
