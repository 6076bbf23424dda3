// Buffers: plain anonymous memory, whatever the storage mode says.
// Weights are read straight into them, so nothing here may touch a buffer's pages (only poisoning, a debugging aid, does).
#include "buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "settings.h"
#include "support.h"

namespace lily::metal {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kAlignment = 256;

std::atomic<size_t> allocated{0};

size_t page_size() {
  static const size_t size = static_cast<size_t>(getpagesize());
  return size;
}
size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

struct Mapping {
  void* base = nullptr;
  size_t bytes = 0;
  unsigned char* contents = nullptr;
};

// strict >= 1: the buffer ends (to 256 bytes) before a page that nobody may touch, so an overrun faults.
Mapping map(size_t length, bool guarded) {
  size_t page = page_size(), body = round_up(length, page), slack = length >= 2 * kHugePage ? kHugePage : 0;
  Mapping m;
  m.bytes = body + slack + (guarded ? page : 0);
  m.base = mmap(nullptr, m.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m.base == MAP_FAILED) {
    m.base = nullptr;
    return m;
  }
  auto* start = static_cast<unsigned char*>(m.base);
  if (guarded) {
    unsigned char* guard = start + m.bytes - page;
    mprotect(guard, page, PROT_NONE);
    m.contents = guard - round_up(length, kAlignment);
  } else if (slack) {
    m.contents = reinterpret_cast<unsigned char*>(round_up(reinterpret_cast<size_t>(start), kHugePage));
    madvise(m.contents, length / kHugePage * kHugePage, MADV_HUGEPAGE);
  } else {
    m.contents = start;
  }
  return m;
}

size_t physical_memory() {
  size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page_size();
  if (FILE* file = fopen("/sys/fs/cgroup/memory.max", "r")) {  // a container's limit
    size_t limit = 0;
    if (fscanf(file, "%zu", &limit) == 1 && limit < bytes) bytes = limit;
    fclose(file);
  }
  return bytes;
}

}  // namespace

NSUInteger allocated_bytes() { return allocated.load(); }
NSUInteger max_buffer_length() {
  static const NSUInteger limit = physical_memory() / 4 * 3;
  return limit;
}
}  // namespace lily::metal

using namespace lily::metal;

@implementation LilyBuffer {
 @public
  Mapping _mapping;
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
  if (_mapping.base) {
    munmap(_mapping.base, _mapping.bytes);
    allocated -= size;
  }
  if (_deallocator) _deallocator(address, size);
}
@end

namespace lily::metal {

static void check_options(NSUInteger length, MTLResourceOptions options) {
  if (length == 0) programming_error("newBuffer: the length must not be 0");
  if (length > max_buffer_length())
    programming_error("newBuffer: length %lu exceeds the device's maxBufferLength %lu", length, max_buffer_length());
  MTLResourceOptions storage = options & 0xF0;
  if (storage != MTLResourceStorageModeShared && storage != MTLResourceStorageModePrivate)
    programming_error("newBuffer: storage mode %lu; buffers of this device are shared or private", storage >> 4);
  if (((options >> 8) & 15) > MTLHazardTrackingModeTracked) programming_error("newBuffer: unknown hazard tracking mode");
}

LilyBuffer* new_buffer(id<MTLDevice> device, NSUInteger length, MTLResourceOptions options) {
  check_options(length, options);
  Mapping mapping = map(length, settings().strict >= 1);
  if (!mapping.base) return nil;  // out of memory: nil, as Metal answers
  LilyBuffer* buffer = [LilyBuffer new];
  buffer->_mapping = mapping;
  buffer->_options = options;
  buffer->_device = device;
  buffer->address = mapping.contents;
  buffer->size = length;
  allocated += length;
  if (settings().poison) memset(mapping.contents, 0xFF, length);  // Metal promises no contents; 0xFFFF is a NaN in every format
  return buffer;
}

LilyBuffer* new_buffer_no_copy(id<MTLDevice> device, void* pointer, NSUInteger length, MTLResourceOptions options,
                               void (^deallocator)(void*, NSUInteger)) {
  check_options(length, options);
  if (!pointer || reinterpret_cast<size_t>(pointer) % page_size())
    programming_error("newBufferWithBytesNoCopy: pointer %p is not page-aligned (%zu bytes)", pointer, page_size());
  if (length % page_size())
    programming_error("newBufferWithBytesNoCopy: length %lu is not a multiple of the page size %zu", length, page_size());
  if ((options & 0xF0) == MTLResourceStorageModePrivate) programming_error("newBufferWithBytesNoCopy: private storage");
  LilyBuffer* buffer = [LilyBuffer new];
  buffer->_options = options;
  buffer->_device = device;
  buffer->_deallocator = deallocator;
  buffer->address = static_cast<unsigned char*>(pointer);
  buffer->size = length;
  return buffer;
}

}  // namespace lily::metal
