// The CPU as a device: plain anonymous memory, the SIMT engine's modules, a queue that runs passes one after the other.
// Weights are read straight into buffers, so nothing here may touch their pages (only poisoning, a debugging aid, does).
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "backend.h"
#include "commands.h"
#include "kernel_binary.h"
#include "settings.h"

namespace lily::metal {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kAlignment = 256;

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

struct CpuLibrary : KernelLibrary {
  LilyModule* module;
  explicit CpuLibrary(LilyModule* opened) : module(opened) { description = lily_simt_describe(opened); }
  ~CpuLibrary() override { lily_simt_close(module); }
};

struct CpuKernel : Kernel {
  std::shared_ptr<KernelLibrary> library;  // keeps the module open
};

class Cpu : public Backend {
 public:
  std::string name() const override {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
      size_t colon = line.find(": ");
      if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return "CPU " + line.substr(colon + 2) + " (software Metal)";
    }
    return "CPU (software Metal)";
  }
  bool unified_memory() const override { return true; }
  size_t working_set() override { return max_buffer_length(); }
  size_t max_buffer_length() override {
    static const size_t limit = physical_memory() / 4 * 3;
    return limit;
  }
  size_t allocated() const override { return allocated_.load(); }

  bool allocate(size_t length, bool shared, Memory& memory) override {
    Mapping mapping = map(length, settings().strict >= 1);
    if (!mapping.base) return false;
    memory = {mapping.contents, mapping.base, mapping.bytes, shared};
    allocated_ += mapping.bytes;
    if (settings().poison) memset(mapping.contents, 0xFF, length);  // Metal promises no contents; 0xFFFF is a NaN in every format
    return true;
  }
  void release(const Memory& memory) override {
    munmap(memory.base, memory.bytes);
    allocated_ -= memory.bytes;
  }
  bool adopt(void*, size_t) override { return true; }
  void abandon(void*) override {}
  void upload(const Memory& memory, const void* bytes, size_t length) override { memcpy(memory.address, bytes, length); }

  std::shared_ptr<KernelLibrary> open_library(const std::string& text, std::string& error) override {
    KernelBinary binary = find_kernel_binary(text);
    error = binary.error;
    if (binary.path.empty()) return nullptr;
    char problem[1024] = "";
    LilyModule* module = lily_simt_open(binary.path.c_str(), problem, sizeof problem);
    error = problem;
    return module ? std::make_shared<CpuLibrary>(module) : nullptr;
  }
  std::shared_ptr<Kernel> make_kernel(const std::shared_ptr<KernelLibrary>& library, uint32_t index, const std::vector<LilyConstantValue>&,
                                      std::string&) override {
    auto kernel = std::make_shared<CpuKernel>();
    kernel->library = library;
    kernel->module = static_cast<CpuLibrary&>(*library).module;
    // A declared maximum is kept by every GPU (the compiler spends fewer registers); without one the GPU decides.
    uint32_t declared = library->description->entries[index].max_threads;
    kernel->max_threads = declared ? declared : settings().max_threads;
    kernel->static_bytes = lily_simt_static_threadgroup_bytes(kernel->module, index);
    return kernel;
  }
  bool runs_in_order() const override { return !settings().reorders() && !settings().hazards; }
  void run_queue(std::shared_ptr<QueueState> state) override { lily::metal::run_queue(std::move(state)); }

 private:
  std::atomic<size_t> allocated_{0};
};

}  // namespace

std::shared_ptr<Backend> cpu_backend() {
  static const auto shared = std::make_shared<Cpu>();
  return shared;
}

}  // namespace lily::metal
