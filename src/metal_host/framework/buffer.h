#pragma once
#import <Metal/Metal.h>

#include <atomic>

#include "backend.h"

@interface LilyBuffer : NSObject <MTLBuffer> {
 @public
  unsigned char* address;  // as kernels see it; the CPU sees the same bytes there when the storage is shared
  NSUInteger size;
  std::atomic<uint64_t> keeper;  // number of the command buffer that kept it last
}
@property(copy, atomic) NSString* label;
@end

namespace lily::metal {
// bytes: initial contents, or null.
LilyBuffer* new_buffer(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, NSUInteger length, MTLResourceOptions options,
                       const void* bytes) NS_RETURNS_RETAINED;
LilyBuffer* new_buffer_no_copy(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, void* pointer, NSUInteger length,
                               MTLResourceOptions options, void (^deallocator)(void*, NSUInteger)) NS_RETURNS_RETAINED;
}  // namespace lily::metal
