// The blit encoder: copies and fills between buffers.
#include "commands.h"
#include "support.h"

using namespace lily::metal;

@interface LilyBlitEncoder : NSObject <MTLBlitCommandEncoder> {
 @public
  LilyCommandBuffer* _commandBuffer;
  Pass* _pass;
  bool _ended;
}
@property(copy, atomic) NSString* label;
@end

static void check_range(const char* what, LilyBuffer* buffer, NSUInteger offset, NSUInteger size) {
  if (!buffer) programming_error("%s: the buffer is nil", what);
  if (!size) programming_error("%s: the size is 0", what);
  if (offset > buffer->size || size > buffer->size - offset)
    programming_error("%s: %lu bytes at offset %lu end beyond the buffer's %lu bytes", what, size, offset, buffer->size);
}

@implementation LilyBlitEncoder
- (id<MTLDevice>)device {
  return [_commandBuffer device];
}
- (void)requireOpen:(const char*)what {
  if (_ended) programming_error("%s: the encoder was used after endEncoding", what);
}

- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destination
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size {
  [self requireOpen:"copyFromBuffer"];
  LilyBuffer *from = (LilyBuffer*)source, *to = (LilyBuffer*)destination;
  check_range("copyFromBuffer: source", from, sourceOffset, size);
  check_range("copyFromBuffer: destination", to, destinationOffset, size);
  if (sourceOffset % 4 || destinationOffset % 4 || size % 4)
    programming_error("copyFromBuffer: offsets %lu and %lu and size %lu must be multiples of 4", sourceOffset, destinationOffset, size);
  if (from == to && sourceOffset < destinationOffset + size && destinationOffset < sourceOffset + size)
    programming_error("copyFromBuffer: the ranges overlap");
  [_commandBuffer keep:from by:from->keeper];
  [_commandBuffer keep:to by:to->keeper];
  _pass->touch(from, false);
  _pass->touch(to, true);
  _pass->blits.push_back({to->address + destinationOffset, from->address + sourceOffset, size, 0});
}

- (void)fillBuffer:(id<MTLBuffer>)generic range:(NSRange)range value:(uint8_t)value {
  [self requireOpen:"fillBuffer"];
  LilyBuffer* buffer = (LilyBuffer*)generic;
  check_range("fillBuffer", buffer, range.location, range.length);
  if (range.location % 4 || range.length % 4)
    programming_error("fillBuffer: range {%lu, %lu} must be made of multiples of 4", range.location, range.length);
  [_commandBuffer keep:buffer by:buffer->keeper];
  _pass->touch(buffer, true);
  _pass->blits.push_back({buffer->address + range.location, nullptr, range.length, value});
}

- (void)endEncoding {
  [self requireOpen:"endEncoding"];
  _ended = true;
  _commandBuffer->encoder_open = false;
}

- (void)dealloc {
  if (!_ended) programming_error("a blit encoder was released before endEncoding");
}
@end

namespace lily::metal {
id<MTLBlitCommandEncoder> new_blit_encoder(LilyCommandBuffer* buffer) {
  LilyBlitEncoder* encoder = [LilyBlitEncoder new];
  encoder->_commandBuffer = buffer;
  encoder->_pass = &add_pass(buffer);
  return encoder;
}
}  // namespace lily::metal
