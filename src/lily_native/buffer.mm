#include "buffer.h"

#include <atomic>
#include <stdexcept>

namespace lily {
namespace {

std::atomic<uint64_t> buffers_created{0};

}  // namespace

Buffer::Buffer(std::shared_ptr<Device> device, size_t nbytes, bool shared, const std::string& label, bool tracked)
    : device_(std::move(device)), nbytes_(nbytes), shared_(shared), label_(label) {
  device_->check_usable();
  if (nbytes == 0) throw std::invalid_argument("buffer " + label + ": 0 bytes");
  @autoreleasepool {
    if (nbytes > [device_->metal() maxBufferLength])
      throw DeviceError("buffer " + label + " of " + std::to_string(nbytes) + " bytes exceeds the device's limit of " +
                        std::to_string([device_->metal() maxBufferLength]) + " bytes for one buffer");
    MTLResourceOptions options = (shared ? MTLResourceStorageModeShared : MTLResourceStorageModePrivate) |
                                 (tracked ? MTLResourceHazardTrackingModeTracked : MTLResourceHazardTrackingModeUntracked);
    metal_ = [device_->metal() newBufferWithLength:nbytes options:options];
    if (!metal_) throw DeviceError("out of memory for buffer " + label + " of " + std::to_string(nbytes) + " bytes");
    [metal_ setLabel:[NSString stringWithUTF8String:label.c_str()]];
  }
  buffers_created++;
}

unsigned char* Buffer::contents() const {
  if (!shared_) throw std::invalid_argument("buffer " + label_ + " has private storage: the CPU cannot see it");
  return static_cast<unsigned char*>([metal_ contents]);
}

void Buffer::check_range(size_t offset, size_t length) const {
  if (offset > nbytes_ || length > nbytes_ - offset)
    throw std::invalid_argument("buffer " + label_ + ": bytes " + std::to_string(offset) + " to " + std::to_string(offset + length) +
                                " lie beyond its " + std::to_string(nbytes_));
  if (offset % 4 || length % 4) throw std::invalid_argument("buffer " + label_ + ": offset and length must be multiples of 4 bytes");
}

void Buffer::fill(int byte, size_t offset, size_t length) {
  check_range(offset, length);
  if (length == 0) return;
  @autoreleasepool {
    id<MTLCommandBuffer> commands = device_->new_command_buffer();
    id<MTLBlitCommandEncoder> encoder = [commands blitCommandEncoder];
    [encoder fillBuffer:metal_ range:NSMakeRange(offset, length) value:static_cast<uint8_t>(byte)];
    [encoder endEncoding];
    device_->wait(*device_->submit(commands), nullptr);
  }
}

void Buffer::copy_to(const Buffer& destination, size_t source_offset, size_t destination_offset, size_t length) const {
  check_range(source_offset, length);
  destination.check_range(destination_offset, length);
  if (length == 0) return;
  if (metal_ == destination.metal_ && source_offset < destination_offset + length && destination_offset < source_offset + length)
    throw std::invalid_argument("buffer " + label_ + ": a copy within one buffer must not overlap");
  @autoreleasepool {
    id<MTLCommandBuffer> commands = device_->new_command_buffer();
    id<MTLBlitCommandEncoder> encoder = [commands blitCommandEncoder];
    [encoder copyFromBuffer:metal_
               sourceOffset:source_offset
                   toBuffer:destination.metal_
          destinationOffset:destination_offset
                       size:length];
    [encoder endEncoding];
    device_->wait(*device_->submit(commands), nullptr);
  }
}

uint64_t Buffer::created() { return buffers_created.load(); }

}  // namespace lily
