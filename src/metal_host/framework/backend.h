// What tells one device of the software Metal from another: its memory, its kernels, and the thread that runs a queue.
#pragma once
#include <stddef.h>

#include <memory>
#include <string>
#include <vector>

#include "../simt/engine.h"

namespace lily::metal {

struct QueueState;

// Memory of one buffer. address: as kernels see it; the CPU sees the bytes of shared storage at the same address.
struct Memory {
  unsigned char* address = nullptr;
  void* base = nullptr;
  size_t bytes = 0;
  bool shared = true;
};

// The kernels of one source text.
struct KernelLibrary {
  const LilyKernelModule* description = nullptr;
  virtual ~KernelLibrary() = default;
};

// One kernel with its function constants.
struct Kernel : std::enable_shared_from_this<Kernel> {
  const LilyModule* module = nullptr;  // of the SIMT engine; null on other devices
  uint32_t max_threads = 0, static_bytes = 0;
  virtual ~Kernel() = default;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;  // its first word is the kind that device="…" asks for
  virtual bool unified_memory() const = 0;
  virtual size_t working_set() = 0;
  virtual size_t max_buffer_length() = 0;
  virtual size_t allocated() const = 0;

  virtual bool allocate(size_t length, bool shared, Memory& memory) = 0;  // false: out of memory
  virtual void release(const Memory& memory) = 0;
  // Makes the caller's memory visible to kernels at the same address; false: it cannot be.
  virtual bool adopt(void* pointer, size_t length) = 0;
  virtual void abandon(void* pointer) = 0;
  virtual void upload(const Memory& memory, const void* bytes, size_t length) = 0;

  // Null and a message on failure. `entry` is an index into the library's entries.
  virtual std::shared_ptr<KernelLibrary> open_library(const std::string& text, std::string& error) = 0;
  virtual std::shared_ptr<Kernel> make_kernel(const std::shared_ptr<KernelLibrary>& library, uint32_t entry,
                                              const std::vector<LilyConstantValue>& constants, std::string& error) = 0;
  // The body of a queue's thread: returns when the state says stopping and nothing is pending. Empty, or why no queue can be made.
  virtual std::string prepare_queue() { return ""; }
  virtual void run_queue(std::shared_ptr<QueueState> state) = 0;
  virtual bool runs_in_order() const = 0;  // passes of a queue never overtake one another
};

std::shared_ptr<Backend> cpu_backend();

}  // namespace lily::metal
