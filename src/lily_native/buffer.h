// Memory that kernels read and write.
#pragma once
#import <Metal/Metal.h>

#include <memory>
#include <string>

#include "device.h"

namespace lily {

class Buffer {
 public:
  // shared: the CPU sees it too. tracked: Metal orders command buffers that use it; weights need no order.
  Buffer(std::shared_ptr<Device> device, size_t nbytes, bool shared, const std::string& label, bool tracked);

  size_t nbytes() const { return nbytes_; }
  const std::string& label() const { return label_; }
  id<MTLBuffer> metal() const { return metal_; }
  unsigned char* contents() const;  // throws for private storage

  // On the GPU, in order with other work; both wait. Offsets and lengths are multiples of 4 bytes.
  void fill(int byte, size_t offset, size_t length);
  void copy_to(const Buffer& destination, size_t source_offset, size_t destination_offset, size_t length) const;

  // Throws std::invalid_argument for a range beyond the end or off the 4-byte grid.
  void check_range(size_t offset, size_t length) const;

  static uint64_t created();  // buffers made by this process so far

 private:
  std::shared_ptr<Device> device_;
  id<MTLBuffer> metal_;
  size_t nbytes_;
  bool shared_;
  std::string label_;
};

}  // namespace lily
