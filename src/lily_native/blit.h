// Copies and fills of a whole batch in one command buffer.
#pragma once
#include <memory>
#include <vector>

#include "buffer.h"

namespace lily {

struct Copy {
  std::shared_ptr<Buffer> source;
  size_t source_offset;
  std::shared_ptr<Buffer> destination;
  size_t destination_offset;
  size_t length;
};

struct Fill {
  std::shared_ptr<Buffer> buffer;
  size_t offset;
  size_t length;
  int byte;
};

// Runs the batch on the GPU and waits. Offsets and lengths are multiples of 4 bytes. Commands of a batch are unordered: no
// range that one of them writes may overlap a range of another (std::invalid_argument).
void blit(Device& device, const std::vector<Copy>& copies, const std::vector<Fill>& fills);

}  // namespace lily
