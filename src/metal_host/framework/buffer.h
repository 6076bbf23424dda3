#pragma once
#import <Metal/Metal.h>

@interface LilyBuffer : NSObject <MTLBuffer> {
 @public
  unsigned char* address;  // GPU and CPU see the same memory, also for private storage
  NSUInteger size;
}
@property(copy, atomic) NSString* label;
@end

namespace lily::metal {
LilyBuffer* new_buffer(id<MTLDevice> device, NSUInteger length, MTLResourceOptions options) NS_RETURNS_RETAINED;
LilyBuffer* new_buffer_no_copy(id<MTLDevice> device, void* pointer, NSUInteger length, MTLResourceOptions options,
                               void (^deallocator)(void*, NSUInteger)) NS_RETURNS_RETAINED;
NSUInteger allocated_bytes();
NSUInteger max_buffer_length();
}  // namespace lily::metal
