// Buffers: memory that the device's backend allocates.
#include "buffer.h"

#include <unistd.h>

#include "support.h"

using namespace lily::metal;

@implementation LilyBuffer {
 @public
  std::shared_ptr<Backend> _backend;
  Memory _memory;  // empty for the caller's own
  MTLResourceOptions _options;
  id<MTLDevice> _device;
  void (^_deallocator)(void*, NSUInteger);
}
@synthesize device = _device;

- (NSUInteger)length {
  return size;
}
- (void*)contents {
  return [self storageMode] == MTLStorageModePrivate ? nullptr : address;
}
- (uint64_t)gpuAddress {
  return reinterpret_cast<uint64_t>(address);
}
- (MTLStorageMode)storageMode {
  return static_cast<MTLStorageMode>((_options >> 4) & 15);
}
// The default for buffers that a device makes is tracked.
- (MTLHazardTrackingMode)hazardTrackingMode {
  auto mode = static_cast<MTLHazardTrackingMode>((_options >> 8) & 3);
  return mode == MTLHazardTrackingModeDefault ? MTLHazardTrackingModeTracked : mode;
}
- (MTLResourceOptions)resourceOptions {
  return _options;
}
- (NSUInteger)allocatedSize {
  return size;
}
- (void)dealloc {
  if (_memory.base) _backend->release(_memory);
  else if (_backend) _backend->abandon(address);
  if (_deallocator) _deallocator(address, size);
}
@end

namespace lily::metal {
namespace {

size_t page_size() {
  static const size_t size = static_cast<size_t>(getpagesize());
  return size;
}

void check_options(Backend& backend, NSUInteger length, MTLResourceOptions options) {
  if (length == 0) programming_error("newBuffer: the length must not be 0");
  if (length > backend.max_buffer_length())
    programming_error("newBuffer: length %lu exceeds the device's maxBufferLength %lu", length, backend.max_buffer_length());
  MTLResourceOptions storage = options & 0xF0;
  if (storage != MTLResourceStorageModeShared && storage != MTLResourceStorageModePrivate)
    programming_error("newBuffer: storage mode %lu; buffers of this device are shared or private", storage >> 4);
  if (((options >> 8) & 15) > MTLHazardTrackingModeTracked) programming_error("newBuffer: unknown hazard tracking mode");
}

LilyBuffer* buffer_at(id<MTLDevice> device, std::shared_ptr<Backend> backend, void* address, NSUInteger length, MTLResourceOptions options) {
  LilyBuffer* buffer = [LilyBuffer new];
  buffer->_backend = std::move(backend);
  buffer->_options = options;
  buffer->_device = device;
  buffer->address = static_cast<unsigned char*>(address);
  buffer->size = length;
  return buffer;
}

}  // namespace

LilyBuffer* new_buffer(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, NSUInteger length, MTLResourceOptions options,
                       const void* bytes) {
  check_options(*backend, length, options);
  Memory memory;
  if (!backend->allocate(length, (options & 0xF0) == MTLResourceStorageModeShared, memory)) return nil;  // out of memory: nil, as Metal answers
  if (bytes) backend->upload(memory, bytes, length);
  LilyBuffer* buffer = buffer_at(device, backend, memory.address, length, options);
  buffer->_memory = memory;
  return buffer;
}

LilyBuffer* new_buffer_no_copy(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, void* pointer, NSUInteger length,
                               MTLResourceOptions options, void (^deallocator)(void*, NSUInteger)) {
  check_options(*backend, length, options);
  if (!pointer || reinterpret_cast<size_t>(pointer) % page_size())
    programming_error("newBufferWithBytesNoCopy: pointer %p is not page-aligned (%zu bytes)", pointer, page_size());
  if (length % page_size())
    programming_error("newBufferWithBytesNoCopy: length %lu is not a multiple of the page size %zu", length, page_size());
  if ((options & 0xF0) == MTLResourceStorageModePrivate) programming_error("newBufferWithBytesNoCopy: private storage");
  if (!backend->adopt(pointer, length)) return nil;
  LilyBuffer* buffer = buffer_at(device, backend, pointer, length, options);
  buffer->_deallocator = deallocator;
  return buffer;
}

}  // namespace lily::metal
