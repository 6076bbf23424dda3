// Metal's semantics, and the mistakes that its validation layer stops.
#import <Metal/Metal.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "probe.h"

static NSString* const kSource = @R"(#include <metal_stdlib>
using namespace metal;
constant uint scale [[function_constant(0)]];
kernel void add(device uint *x [[buffer(0)]], constant uint &n [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  if (i < n) x[i] += 1;
}
kernel void times(device uint *x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] *= scale; }
kernel void copy(device const uint *x [[buffer(0)]], device uint *y [[buffer(1)]], uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void dynamic(device uint *x [[buffer(0)]], threadgroup uint *t [[threadgroup(0)]], uint i [[thread_position_in_threadgroup]]) {
  threadgroup uint fixed[4096];
  fixed[i] = i; t[i] = i;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = t[i ^ 1] + fixed[i ^ 2];
}
kernel void diverge(device uint *x [[buffer(0)]], uint i [[thread_position_in_threadgroup]]) {
  if (i < 16) threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = i;
}
[[max_total_threads_per_threadgroup(64)]] kernel void small(device uint *x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = i; }
)";

// Everything that a scenario needs, made once.
struct World {
  id<MTLDevice> device = MTLCreateSystemDefaultDevice();
  id<MTLCommandQueue> queue = [device newCommandQueue];
  id<MTLLibrary> library;
  id<MTLBuffer> buffer;
  World() {
    NSError* error = nil;
    MTLCompileOptions* options = [MTLCompileOptions new];
    options.languageVersion = MTLLanguageVersion3_1;
    options.mathMode = MTLMathModeSafe;
    library = [device newLibraryWithSource:kSource options:options error:&error];
    if (!library) fprintf(stderr, "%s\n", [[error localizedDescription] UTF8String]);
    CHECK(library);
    buffer = [device newBufferWithLength:4096 options:MTLResourceStorageModeShared];
    memset([buffer contents], 0, 4096);
  }
  id<MTLComputePipelineState> pipeline(NSString* name) {
    MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
    uint32_t scale = 3;
    [values setConstantValue:&scale type:MTLDataTypeUInt atIndex:0];
    NSError* error = nil;
    id<MTLFunction> function = [library newFunctionWithName:name constantValues:values error:&error];
    CHECK(function);
    return [device newComputePipelineStateWithFunction:function error:&error];
  }
  uint32_t* words() { return static_cast<uint32_t*>([buffer contents]); }
};

static void dispatch(id<MTLComputeCommandEncoder> encoder, NSUInteger groups, NSUInteger threads) {
  [encoder dispatchThreadgroups:MTLSizeMake(groups, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
}

// An encoder with kernel `add` bound in full.
static id<MTLComputeCommandEncoder> add_encoder(World& w, id<MTLCommandBuffer> commands, MTLDispatchType type) {
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoderWithDispatchType:type];
  uint32_t n = 1024;
  [encoder setComputePipelineState:w.pipeline(@"add")];
  [encoder setBuffer:w.buffer offset:0 atIndex:0];
  [encoder setBytes:&n length:4 atIndex:1];
  return encoder;
}

static void run_everything() {
  @autoreleasepool {
    World w;
    id<MTLCommandBuffer> commands = [w.queue commandBuffer];
    CHECK([commands status] == MTLCommandBufferStatusNotEnqueued);
    id<MTLComputeCommandEncoder> encoder = add_encoder(w, commands, MTLDispatchTypeConcurrent);
    [encoder dispatchThreads:MTLSizeMake(1000, 1, 1) threadsPerThreadgroup:MTLSizeMake(256, 1, 1)];  // ragged
    [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
    [encoder setComputePipelineState:w.pipeline(@"times")];
    dispatch(encoder, 4, 256);
    const id<MTLResource> __unsafe_unretained resources[] = {w.buffer};
    [encoder memoryBarrierWithResources:resources count:1];
    id<MTLBuffer> counts = [w.device newBufferWithLength:64 options:MTLResourceStorageModeShared];
    MTLDispatchThreadgroupsIndirectArguments two = {{2, 1, 1}};
    memcpy(static_cast<char*>([counts contents]) + 16, &two, sizeof two);
    [encoder dispatchThreadgroupsWithIndirectBuffer:counts indirectBufferOffset:16 threadsPerThreadgroup:MTLSizeMake(256, 1, 1)];
    [encoder endEncoding];
    id<MTLBuffer> copy = [w.device newBufferWithLength:4096 options:MTLResourceStorageModePrivate];
    CHECK([copy contents] == nullptr);
    id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
    [blit copyFromBuffer:w.buffer sourceOffset:0 toBuffer:copy destinationOffset:0 size:4096];
    [blit fillBuffer:w.buffer range:NSMakeRange(0, 4) value:0xAB];
    [blit copyFromBuffer:copy sourceOffset:0 toBuffer:w.buffer destinationOffset:2048 size:1024];
    [blit endEncoding];
    __block int handled = 0;
    [commands addCompletedHandler:^(id<MTLCommandBuffer> done) {
      handled += [done status] == MTLCommandBufferStatusCompleted;
    }];
    [commands commit];
    [commands waitUntilCompleted];
    CHECK(handled == 1 && [commands status] == MTLCommandBufferStatusCompleted && [commands error] == nil);
    CHECK([commands GPUEndTime] >= [commands GPUStartTime] && [commands GPUStartTime] > 0);
    uint32_t* x = w.words();
    CHECK(x[0] == 0xABABABAB && x[1] == 9 && x[511] == 9 && x[512] == 9 && x[767] == 9 && x[768] == 3 && x[999] == 3 && x[1000] == 0);
  }
}

static void serial_order() {
  @autoreleasepool {
    World w;
    id<MTLCommandBuffer> commands = [w.queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = add_encoder(w, commands, MTLDispatchTypeSerial);
    for (int i = 0; i < 3; i++) {
      [encoder setComputePipelineState:w.pipeline(@"add")];
      dispatch(encoder, 4, 256);
      [encoder setComputePipelineState:w.pipeline(@"times")];
      dispatch(encoder, 4, 256);
    }
    [encoder endEncoding];
    [commands commit];
    [commands waitUntilCompleted];
    CHECK(w.words()[17] == ((1 * 3 + 1) * 3 + 1) * 3);
  }
}

// Two command buffers: x += 1, then y = x. With tracked buffers y is 1; nothing orders untracked ones.
static unsigned overtaking(MTLResourceOptions tracking) {
  World w;
  unsigned stale = 0;
  for (int round = 0; round < 20; round++) {
    id<MTLBuffer> x = [w.device newBufferWithLength:4096 options:tracking], y = [w.device newBufferWithLength:4096 options:tracking];
    memset([x contents], 0, 4096);
    id<MTLCommandBuffer> first = [w.queue commandBuffer], second = [w.queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = add_encoder(w, first, MTLDispatchTypeConcurrent);
    [encoder setBuffer:x offset:0 atIndex:0];
    dispatch(encoder, 4, 256);
    [encoder endEncoding];
    encoder = [second computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
    [encoder setComputePipelineState:w.pipeline(@"copy")];
    [encoder setBuffer:x offset:0 atIndex:0];
    [encoder setBuffer:y offset:0 atIndex:1];
    dispatch(encoder, 4, 256);
    [encoder endEncoding];
    [first enqueue];
    [second commit];
    [first commit];
    [second waitUntilCompleted];
    CHECK([first status] == MTLCommandBufferStatusCompleted);
    stale += static_cast<uint32_t*>([y contents])[5] != 1;
  }
  return stale;
}
static void tracked() {
  @autoreleasepool {
    printf("stale %u\n", overtaking(MTLResourceStorageModeShared));
  }
}
static void untracked() {
  @autoreleasepool {
    printf("stale %u\n", overtaking(MTLResourceStorageModeShared | MTLResourceHazardTrackingModeUntracked));
  }
}

static void missing_barrier() {
  @autoreleasepool {
    World w;
    unsigned wrong = 0;
    for (int round = 0; round < 20; round++) {
      memset([w.buffer contents], 0, 4096);
      id<MTLCommandBuffer> commands = [w.queue commandBuffer];
      id<MTLComputeCommandEncoder> encoder = add_encoder(w, commands, MTLDispatchTypeConcurrent);
      dispatch(encoder, 1, 256);
      [encoder setComputePipelineState:w.pipeline(@"times")];
      dispatch(encoder, 1, 256);
      [encoder endEncoding];
      [commands commit];
      [commands waitUntilCompleted];
      wrong += w.words()[0] != 3;
    }
    printf("wrong %u\n", wrong);
  }
}

static void fault() {
  @autoreleasepool {
    World w;
    id<MTLCommandBuffer> bad = [w.queue commandBuffer], good = [w.queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [bad computeCommandEncoder];
    [encoder setComputePipelineState:w.pipeline(@"diverge")];
    [encoder setBuffer:w.buffer offset:0 atIndex:0];
    dispatch(encoder, 1, 64);
    [encoder endEncoding];
    [bad commit];
    encoder = add_encoder(w, good, MTLDispatchTypeSerial);
    dispatch(encoder, 1, 32);
    [encoder endEncoding];
    [good commit];
    [good waitUntilCompleted];
    CHECK([bad status] == MTLCommandBufferStatusError && [bad error] && [good status] == MTLCommandBufferStatusCompleted);
    CHECK([[bad error] userInfo][NSUnderlyingErrorKey] != nil);
    printf("%s\n", [[[bad error] localizedDescription] UTF8String]);
  }
}

static void library_errors() {
  @autoreleasepool {
    World w;
    NSError* error = nil;
    id<MTLFunction> function = [w.library newFunctionWithName:@"nothing" constantValues:[MTLFunctionConstantValues new] error:&error];
    CHECK(!function && error);
    error = nil;
    function = [w.library newFunctionWithName:@"times" constantValues:[MTLFunctionConstantValues new] error:&error];
    CHECK(!function && error);
    printf("%s\n", [[error localizedDescription] UTF8String]);
    MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
    float wrong = 1;
    [values setConstantValue:&wrong type:MTLDataTypeFloat atIndex:0];
    error = nil;
    CHECK(![w.library newFunctionWithName:@"times" constantValues:values error:&error] && error);
    error = nil;
    CHECK(![w.device newLibraryWithSource:@"kernel void broken(" options:nil error:&error] && error);
    CHECK([w.pipeline(@"small") maxTotalThreadsPerThreadgroup] == 64);
    printf("limit %lu\n", [w.pipeline(@"add") maxTotalThreadsPerThreadgroup]);
  }
}

static void no_copy() {
  @autoreleasepool {
    World w;
    size_t page = static_cast<size_t>(getpagesize());
    void* memory = mmap(nullptr, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    __block NSUInteger freed = 0;
    @autoreleasepool {
      id<MTLBuffer> buffer = [w.device newBufferWithBytesNoCopy:memory
                                                         length:page
                                                        options:MTLResourceStorageModeShared
                                                    deallocator:^(void* pointer, NSUInteger length) {
                                                      CHECK(pointer == memory);
                                                      freed = length;
                                                    }];
      CHECK([buffer contents] == memory && [buffer length] == page);
    }
    CHECK(freed == page);
  }
}

// ---- each of these must abort

#define MISTAKE(name, ...)                             \
  static void name() {                                 \
    World w;                                           \
    id<MTLCommandBuffer> commands = [w.queue commandBuffer]; \
    __VA_ARGS__                                        \
  }
#define WITH_ENCODER id<MTLComputeCommandEncoder> encoder = add_encoder(w, commands, MTLDispatchTypeConcurrent);

MISTAKE(misaligned, WITH_ENCODER [encoder setBuffer:w.buffer offset:2 atIndex:0]; dispatch(encoder, 1, 32);)
MISTAKE(unbound, WITH_ENCODER [encoder setBuffer:nil offset:0 atIndex:0]; dispatch(encoder, 1, 32);)
MISTAKE(too_many_threads, WITH_ENCODER [encoder setComputePipelineState:w.pipeline(@"small")]; dispatch(encoder, 1, 128);)
MISTAKE(over_limit, WITH_ENCODER dispatch(encoder, 1, 1025);)
MISTAKE(index_31, WITH_ENCODER [encoder setBuffer:w.buffer offset:0 atIndex:31];)
MISTAKE(offset_beyond, WITH_ENCODER [encoder setBuffer:w.buffer offset:4096 atIndex:0];)
MISTAKE(long_bytes, WITH_ENCODER static char bytes[4100]; [encoder setBytes:bytes length:sizeof bytes atIndex:1];)
MISTAKE(written_bytes, WITH_ENCODER int value = 0; [encoder setBytes:&value length:4 atIndex:0]; dispatch(encoder, 1, 32);)
MISTAKE(after_end, WITH_ENCODER [encoder endEncoding]; dispatch(encoder, 1, 32);)
MISTAKE(left_open, WITH_ENCODER [commands commit]; (void)encoder;)
MISTAKE(two_encoders, WITH_ENCODER [commands computeCommandEncoder]; (void)encoder;)
MISTAKE(commit_twice, [commands commit]; [commands commit];)
MISTAKE(wait_uncommitted, [commands waitUntilCompleted];)
MISTAKE(late_handler, [commands commit]; [commands addCompletedHandler:^(id<MTLCommandBuffer>){}];)
MISTAKE(no_pipeline, id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder]; dispatch(encoder, 1, 32);)
MISTAKE(empty_grid, WITH_ENCODER dispatch(encoder, 0, 32);)
MISTAKE(threadgroup_unset, WITH_ENCODER [encoder setComputePipelineState:w.pipeline(@"dynamic")]; dispatch(encoder, 1, 32);)
MISTAKE(threadgroup_sum, WITH_ENCODER [encoder setComputePipelineState:w.pipeline(@"dynamic")];
        [encoder setThreadgroupMemoryLength:16400 atIndex:0]; dispatch(encoder, 1, 32);)
MISTAKE(threadgroup_16, WITH_ENCODER [encoder setThreadgroupMemoryLength:24 atIndex:0];)
MISTAKE(blit_beyond, id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
        [blit fillBuffer:w.buffer range:NSMakeRange(4000, 100) value:0];)
MISTAKE(zero_buffer, [w.device newBufferWithLength:0 options:MTLResourceStorageModeShared];)
MISTAKE(no_copy_pointer, static char bytes[8192]; char* odd = bytes + (reinterpret_cast<size_t>(bytes) % 2 ? 2 : 1);
        [w.device newBufferWithBytesNoCopy:odd length:4096 options:0 deallocator:nil];)

#define ENTRY(name) {#name, name}
const Scenario metal_scenarios[] = {
    ENTRY(run_everything), ENTRY(serial_order), ENTRY(tracked), ENTRY(untracked), ENTRY(missing_barrier), ENTRY(fault),
    ENTRY(library_errors), ENTRY(no_copy), ENTRY(misaligned), ENTRY(unbound), ENTRY(too_many_threads), ENTRY(over_limit),
    ENTRY(index_31), ENTRY(offset_beyond), ENTRY(long_bytes), ENTRY(written_bytes), ENTRY(after_end), ENTRY(left_open),
    ENTRY(two_encoders), ENTRY(commit_twice), ENTRY(wait_uncommitted), ENTRY(late_handler), ENTRY(no_pipeline),
    ENTRY(empty_grid), ENTRY(threadgroup_unset), ENTRY(threadgroup_sum), ENTRY(threadgroup_16), ENTRY(blit_beyond),
    ENTRY(zero_buffer), ENTRY(no_copy_pointer), {nullptr, nullptr},
};
