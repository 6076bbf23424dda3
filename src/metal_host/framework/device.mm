// The device: one, the CPU, which passes for an Apple GPU of the family that LILY_METAL_HOST asks for.
#include <fstream>

#include "buffer.h"
#include "commands.h"
#include "library.h"
#include "settings.h"
#include "support.h"

using namespace lily::metal;

@interface LilyDevice : NSObject <MTLDevice>
@end

static std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

@implementation LilyDevice
- (NSString*)name {
  return lily::metal::string("CPU " + cpu_name() + " (software Metal)");  // the first word is the kind that device="cpu" asks for
}
- (uint64_t)registryID {
  return 1;
}
- (MTLSize)maxThreadsPerThreadgroup {
  return MTLSizeMake(LILY_MAX_THREADS, LILY_MAX_THREADS, LILY_MAX_THREADS);
}
- (NSUInteger)maxThreadgroupMemoryLength {
  return LILY_THREADGROUP_LIMIT;
}
- (NSUInteger)maxBufferLength {
  return max_buffer_length();
}
- (uint64_t)recommendedMaxWorkingSetSize {
  return max_buffer_length();
}
- (NSUInteger)currentAllocatedSize {
  return allocated_bytes();
}
- (BOOL)hasUnifiedMemory {
  return YES;
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
  return new_queue(self, 64);
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)count {
  if (!count) programming_error("newCommandQueueWithMaxCommandBufferCount: 0");
  return new_queue(self, count);
}
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options {
  return new_buffer(self, length, options);
}
- (id<MTLBuffer>)newBufferWithBytes:(const void*)bytes length:(NSUInteger)length options:(MTLResourceOptions)options {
  if (!bytes) programming_error("newBufferWithBytes: no bytes");
  LilyBuffer* buffer = new_buffer(self, length, options);
  if (buffer) memcpy(buffer->address, bytes, length);
  return buffer;
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void*, NSUInteger))deallocator {
  return new_buffer_no_copy(self, pointer, length, options, deallocator);
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError* __autoreleasing*)error {
  if (!source) programming_error("newLibraryWithSource: the source is nil");
  return new_library(self, source, options, error);
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError* __autoreleasing*)error {
  return new_pipeline(self, function, error);
}
@end

// One object stands for the device as long as anybody holds it.
id<MTLDevice> MTLCreateSystemDefaultDevice(void) {
  static std::mutex mutex;
  static __weak LilyDevice* shared;
  std::lock_guard<std::mutex> lock(mutex);
  LilyDevice* device = shared;
  if (!device) {
    settings();  // a malformed LILY_METAL_HOST is reported now
    device = [LilyDevice new];
    shared = device;
  }
  return device;
}

NSArray<id<MTLDevice>>* MTLCopyAllDevices(void) {
  id __unsafe_unretained devices[1];
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  devices[0] = device;
  return [NSArray arrayWithObjects:devices count:1];
}
