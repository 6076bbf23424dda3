// Hand-written subset of Metal's interface: compute and blit on buffers. Names, values and semantics are Apple's.
#pragma once
#import <Foundation/Foundation.h>

typedef struct {
  NSUInteger width, height, depth;
} MTLSize;
static inline MTLSize MTLSizeMake(NSUInteger width, NSUInteger height, NSUInteger depth) {
  MTLSize size = {width, height, depth};
  return size;
}
typedef struct {
  uint32_t threadgroupsPerGrid[3];
} MTLDispatchThreadgroupsIndirectArguments;

// ---- resources

typedef NS_ENUM(NSUInteger, MTLCPUCacheMode){MTLCPUCacheModeDefaultCache = 0, MTLCPUCacheModeWriteCombined = 1};
typedef NS_ENUM(NSUInteger, MTLStorageMode){MTLStorageModeShared = 0, MTLStorageModeManaged = 1, MTLStorageModePrivate = 2, MTLStorageModeMemoryless = 3};
typedef NS_ENUM(NSUInteger, MTLHazardTrackingMode){MTLHazardTrackingModeDefault = 0, MTLHazardTrackingModeUntracked = 1, MTLHazardTrackingModeTracked = 2};
typedef NS_OPTIONS(NSUInteger, MTLResourceOptions){
    MTLResourceCPUCacheModeDefaultCache = MTLCPUCacheModeDefaultCache,
    MTLResourceCPUCacheModeWriteCombined = MTLCPUCacheModeWriteCombined,
    MTLResourceStorageModeShared = MTLStorageModeShared << 4,
    MTLResourceStorageModeManaged = MTLStorageModeManaged << 4,
    MTLResourceStorageModePrivate = MTLStorageModePrivate << 4,
    MTLResourceStorageModeMemoryless = MTLStorageModeMemoryless << 4,
    MTLResourceHazardTrackingModeDefault = MTLHazardTrackingModeDefault << 8,
    MTLResourceHazardTrackingModeUntracked = MTLHazardTrackingModeUntracked << 8,
    MTLResourceHazardTrackingModeTracked = MTLHazardTrackingModeTracked << 8,
};

@protocol MTLDevice, MTLLibrary, MTLCommandQueue, MTLCommandBuffer;

@protocol MTLResource <NSObject>
@property(copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) MTLStorageMode storageMode;
@property(readonly) MTLHazardTrackingMode hazardTrackingMode;
@property(readonly) MTLResourceOptions resourceOptions;
@property(readonly) NSUInteger allocatedSize;
@end

@protocol MTLBuffer <MTLResource>
@property(readonly) NSUInteger length;
@property(readonly) uint64_t gpuAddress;
- (void*)contents;
@end

// ---- libraries, functions, pipelines

typedef NS_ENUM(NSUInteger, MTLLanguageVersion){
    MTLLanguageVersion2_4 = (2 << 16) + 4, MTLLanguageVersion3_0 = (3 << 16) + 0, MTLLanguageVersion3_1 = (3 << 16) + 1,
    MTLLanguageVersion3_2 = (3 << 16) + 2, MTLLanguageVersion4_0 = (4 << 16) + 0,
};
typedef NS_ENUM(NSInteger, MTLMathMode){MTLMathModeSafe = 0, MTLMathModeRelaxed = 1, MTLMathModeFast = 2};
typedef NS_ENUM(NSUInteger, MTLFunctionType){MTLFunctionTypeVertex = 1, MTLFunctionTypeFragment = 2, MTLFunctionTypeKernel = 3};
typedef NS_ENUM(NSUInteger, MTLDataType){
    MTLDataTypeNone = 0,    MTLDataTypeFloat = 3,   MTLDataTypeFloat2 = 4,  MTLDataTypeFloat3 = 5,   MTLDataTypeFloat4 = 6,  MTLDataTypeHalf = 16,
    MTLDataTypeInt = 29,    MTLDataTypeInt2 = 30,   MTLDataTypeInt3 = 31,   MTLDataTypeInt4 = 32,    MTLDataTypeUInt = 33,   MTLDataTypeUInt2 = 34,
    MTLDataTypeUInt3 = 35,  MTLDataTypeUInt4 = 36,  MTLDataTypeShort = 37,  MTLDataTypeUShort = 41,  MTLDataTypeChar = 45,   MTLDataTypeUChar = 49,
    MTLDataTypeBool = 53,   MTLDataTypeLong = 81,   MTLDataTypeULong = 85,  MTLDataTypeBFloat = 121,
};

@interface MTLCompileOptions : NSObject <NSCopying>
@property(readwrite, nonatomic) MTLLanguageVersion languageVersion;
@property(readwrite, nonatomic) MTLMathMode mathMode;
@property(readwrite, nonatomic) BOOL fastMathEnabled;
@end

@interface MTLFunctionConstantValues : NSObject <NSCopying>
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index;
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name;
- (void)reset;
@end

@protocol MTLFunction <NSObject>
@property(copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSString* name;
@property(readonly) MTLFunctionType functionType;
@end

@protocol MTLLibrary <NSObject>
@property(copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSArray<NSString*>* functionNames;
- (id<MTLFunction>)newFunctionWithName:(NSString*)name;
- (id<MTLFunction>)newFunctionWithName:(NSString*)name constantValues:(MTLFunctionConstantValues*)values error:(NSError* __autoreleasing*)error;
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@property(readonly) NSUInteger staticThreadgroupMemoryLength;
@end

extern NSErrorDomain const MTLLibraryErrorDomain;
typedef NS_ENUM(NSUInteger, MTLLibraryError){
    MTLLibraryErrorUnsupported = 1, MTLLibraryErrorInternal = 2, MTLLibraryErrorCompileFailure = 3, MTLLibraryErrorCompileWarning = 4,
    MTLLibraryErrorFunctionNotFound = 5, MTLLibraryErrorFileNotFound = 6,
};

// ---- commands

typedef NS_ENUM(NSUInteger, MTLDispatchType){MTLDispatchTypeSerial = 0, MTLDispatchTypeConcurrent = 1};
typedef NS_OPTIONS(NSUInteger, MTLBarrierScope){MTLBarrierScopeBuffers = 1 << 0, MTLBarrierScopeTextures = 1 << 1};

@protocol MTLCommandEncoder <NSObject>
@property(copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
- (void)endEncoding;
@end

@protocol MTLComputeCommandEncoder <MTLCommandEncoder>
@property(readonly) MTLDispatchType dispatchType;
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state;
- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index;
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index;
- (void)dispatchThreadgroups:(MTLSize)threadgroupsPerGrid threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup;
- (void)dispatchThreads:(MTLSize)threadsPerGrid threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup;
- (void)dispatchThreadgroupsWithIndirectBuffer:(id<MTLBuffer>)buffer
                          indirectBufferOffset:(NSUInteger)offset
                         threadsPerThreadgroup:(MTLSize)threadsPerThreadgroup;
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope;
- (void)memoryBarrierWithResources:(const id<MTLResource> __unsafe_unretained[])resources count:(NSUInteger)count;
@end

@protocol MTLBlitCommandEncoder <MTLCommandEncoder>
- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destination
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size;
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value;
@end

typedef NS_ENUM(NSUInteger, MTLCommandBufferStatus){
    MTLCommandBufferStatusNotEnqueued = 0, MTLCommandBufferStatusEnqueued = 1,  MTLCommandBufferStatusCommitted = 2,
    MTLCommandBufferStatusScheduled = 3,   MTLCommandBufferStatusCompleted = 4, MTLCommandBufferStatusError = 5,
};
extern NSErrorDomain const MTLCommandBufferErrorDomain;
typedef NS_ENUM(NSUInteger, MTLCommandBufferError){
    MTLCommandBufferErrorNone = 0,         MTLCommandBufferErrorInternal = 1,         MTLCommandBufferErrorTimeout = 2,
    MTLCommandBufferErrorPageFault = 3,    MTLCommandBufferErrorAccessRevoked = 4,    MTLCommandBufferErrorNotPermitted = 7,
    MTLCommandBufferErrorOutOfMemory = 8,  MTLCommandBufferErrorInvalidResource = 9,  MTLCommandBufferErrorMemoryless = 10,
    MTLCommandBufferErrorStackOverflow = 12,
};
typedef void (^MTLCommandBufferHandler)(id<MTLCommandBuffer> commandBuffer);

@protocol MTLCommandBuffer <NSObject>
@property(copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) id<MTLCommandQueue> commandQueue;
@property(readonly) BOOL retainedReferences;
@property(readonly) MTLCommandBufferStatus status;
@property(readonly) NSError* error;
@property(readonly) CFTimeInterval GPUStartTime;
@property(readonly) CFTimeInterval GPUEndTime;
- (id<MTLComputeCommandEncoder>)computeCommandEncoder;
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type;
- (id<MTLBlitCommandEncoder>)blitCommandEncoder;
- (void)addScheduledHandler:(MTLCommandBufferHandler)handler;
- (void)addCompletedHandler:(MTLCommandBufferHandler)handler;
- (void)enqueue;
- (void)commit;
- (void)waitUntilScheduled;
- (void)waitUntilCompleted;
@end

@protocol MTLCommandQueue <NSObject>
@property(copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
- (id<MTLCommandBuffer>)commandBuffer;
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences;
@end

// ---- device

typedef NS_ENUM(NSInteger, MTLGPUFamily){
    MTLGPUFamilyApple1 = 1001, MTLGPUFamilyApple2 = 1002, MTLGPUFamilyApple3 = 1003, MTLGPUFamilyApple4 = 1004,  MTLGPUFamilyApple5 = 1005,
    MTLGPUFamilyApple6 = 1006, MTLGPUFamilyApple7 = 1007, MTLGPUFamilyApple8 = 1008, MTLGPUFamilyApple9 = 1009,  MTLGPUFamilyApple10 = 1010,
    MTLGPUFamilyMac2 = 2002,   MTLGPUFamilyCommon1 = 3001, MTLGPUFamilyCommon2 = 3002, MTLGPUFamilyCommon3 = 3003,
    MTLGPUFamilyMetal3 = 5001, MTLGPUFamilyMetal4 = 5002,
};

@protocol MTLDevice <NSObject>
@property(readonly) NSString* name;
@property(readonly) uint64_t registryID;
@property(readonly) MTLSize maxThreadsPerThreadgroup;
@property(readonly) NSUInteger maxThreadgroupMemoryLength;
@property(readonly) NSUInteger maxBufferLength;
@property(readonly) uint64_t recommendedMaxWorkingSetSize;
@property(readonly) NSUInteger currentAllocatedSize;
@property(readonly) BOOL hasUnifiedMemory;
@property(readonly, getter=isLowPower) BOOL lowPower;
@property(readonly, getter=isHeadless) BOOL headless;
@property(readonly, getter=isRemovable) BOOL removable;
- (BOOL)supportsFamily:(MTLGPUFamily)family;
- (id<MTLCommandQueue>)newCommandQueue;
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)count;
- (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytes:(const void*)bytes length:(NSUInteger)length options:(MTLResourceOptions)options;
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(void*)pointer
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void* pointer, NSUInteger length))deallocator;
- (id<MTLLibrary>)newLibraryWithSource:(NSString*)source options:(MTLCompileOptions*)options error:(NSError* __autoreleasing*)error;
- (id<MTLComputePipelineState>)newComputePipelineStateWithFunction:(id<MTLFunction>)function error:(NSError* __autoreleasing*)error;
@end

extern "C" id<MTLDevice> MTLCreateSystemDefaultDevice(void) NS_RETURNS_RETAINED;
extern "C" NSArray<id<MTLDevice>>* MTLCopyAllDevices(void) NS_RETURNS_RETAINED;
