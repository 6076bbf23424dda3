#include "blit.h"

#include <algorithm>
#include <stdexcept>

namespace lily {
namespace {

struct Range {
  const Buffer* buffer;
  size_t begin, end;
  bool written;
};

void refuse_overlaps(std::vector<Range>& ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.buffer != b.buffer ? a.buffer < b.buffer : a.begin < b.begin; });
  size_t read_end = 0, write_end = 0;  // of the ranges of this buffer so far
  for (size_t i = 0; i < ranges.size(); i++) {
    const Range& range = ranges[i];
    if (i == 0 || range.buffer != ranges[i - 1].buffer) read_end = write_end = 0;
    if (range.begin < write_end || (range.written && range.begin < read_end))
      throw std::invalid_argument("blit: buffer " + range.buffer->label() + ": byte " + std::to_string(range.begin) +
                                  " is written and used twice in one batch");
    size_t& end = range.written ? write_end : read_end;
    end = std::max(end, range.end);
  }
}

}  // namespace

void blit(Device& device, const std::vector<Copy>& copies, const std::vector<Fill>& fills) {
  std::vector<Range> ranges;
  auto add = [&](const Buffer& buffer, size_t offset, size_t length, bool written) {
    buffer.check_range(offset, length);
    if (length > 0) ranges.push_back({&buffer, offset, offset + length, written});
  };
  for (const Copy& copy : copies) {
    add(*copy.source, copy.source_offset, copy.length, false);
    add(*copy.destination, copy.destination_offset, copy.length, true);
  }
  for (const Fill& fill : fills) {
    if (fill.byte < 0 || fill.byte > 255) throw std::invalid_argument("fill: a byte is 0 to 255");
    add(*fill.buffer, fill.offset, fill.length, true);
  }
  if (ranges.empty()) return;
  refuse_overlaps(ranges);
  @autoreleasepool {
    id<MTLCommandBuffer> commands = device.new_command_buffer();
    id<MTLBlitCommandEncoder> encoder = [commands blitCommandEncoder];
    for (const Fill& fill : fills)
      if (fill.length > 0)
        [encoder fillBuffer:fill.buffer->metal() range:NSMakeRange(fill.offset, fill.length) value:static_cast<uint8_t>(fill.byte)];
    for (const Copy& copy : copies)
      if (copy.length > 0)
        [encoder copyFromBuffer:copy.source->metal()
                   sourceOffset:copy.source_offset
                       toBuffer:copy.destination->metal()
              destinationOffset:copy.destination_offset
                           size:copy.length];
    [encoder endEncoding];
    device.wait(*device.submit(commands), nullptr);
  }
}

}  // namespace lily
