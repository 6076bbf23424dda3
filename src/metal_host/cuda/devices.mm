#include "devices.h"

#include "../framework/commands.h"
#include "../framework/settings.h"
#include "kernel.h"
#include "stream_queue.h"

namespace lily::cuda {
namespace {

class Gpu : public metal::Backend {
 public:
  explicit Gpu(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  std::string name() const override { return "CUDA " + context_->name(); }
  bool unified_memory() const override { return false; }
  size_t working_set() override { return context_->working_set(); }
  size_t max_buffer_length() override { return context_->total_memory(); }
  size_t allocated() const override { return allocated_.load(); }

  bool allocate(size_t length, bool shared, metal::Memory& memory) override {
    const Driver& d = driver();
    if (!context_->enter()) return false;
    CUdeviceptr address = 0;
    void* host = nullptr;
    CUresult code = shared ? d.cuMemHostAlloc(&host, length, kHostPortable | kHostDeviceMap) : d.cuMemAlloc_v2(&address, length);
    if (context_->note(code)) return false;
    if (shared) address = reinterpret_cast<CUdeviceptr>(host);  // one address space: the GPU sees it at the same address
    memory = {reinterpret_cast<unsigned char*>(address), reinterpret_cast<void*>(address), length, shared};
    allocated_ += length;
    if (metal::settings().poison) context_->note(d.cuMemsetD8_v2(address, 0xFF, length));
    return true;
  }
  void release(const metal::Memory& memory) override {
    allocated_ -= memory.bytes;
    if (!context_->enter()) return;
    if (memory.shared) driver().cuMemFreeHost(memory.base);
    else driver().cuMemFree_v2(reinterpret_cast<CUdeviceptr>(memory.base));
  }
  bool adopt(void* pointer, size_t length) override {
    return context_->enter() && !context_->note(driver().cuMemHostRegister_v2(pointer, length, kHostPortable | kHostDeviceMap));
  }
  void abandon(void* pointer) override {
    if (context_->enter()) driver().cuMemHostUnregister(pointer);
  }
  void upload(const metal::Memory& memory, const void* bytes, size_t length) override {
    if (context_->enter()) context_->note(driver().cuMemcpyHtoD_v2(reinterpret_cast<CUdeviceptr>(memory.address), bytes, length));
  }

  std::shared_ptr<metal::KernelLibrary> open_library(const std::string& text, std::string& error) override { return Library::open(text, error); }
  std::shared_ptr<metal::Kernel> make_kernel(const std::shared_ptr<metal::KernelLibrary>& library, uint32_t entry,
                                             const std::vector<LilyConstantValue>& constants, std::string& error) override {
    for (size_t i = 0; i < constants.size(); i++)
      if (constants[i].defined && !library->description->constants[i].size) {
        error = "function constant " + std::string(library->description->constants[i].name) + ": vectors are not supported on this device";
        return nullptr;
      }
    auto kernel = std::make_shared<GpuKernel>(context_, std::static_pointer_cast<Library>(library), entry, constants);
    return kernel->function(false, error) ? kernel : nullptr;
  }
  std::string prepare_queue() override { return context_->enter() ? "" : context_->fault(); }
  bool runs_in_order() const override { return true; }
  void run_queue(std::shared_ptr<metal::QueueState> state) override { cuda::run_queue(context_, *state); }

 private:
  std::shared_ptr<Context> context_;
  std::atomic<size_t> allocated_{0};
};

struct Found {
  std::vector<std::shared_ptr<metal::Backend>> gpus;
  std::string absence;
};

Found look() {
  Found found;
  const Driver& d = driver();
  found.absence = d.problem;
  if (!found.absence.empty()) return found;
  int count = 0;
  if (CUresult code = d.cuDeviceGetCount(&count)) found.absence = "the NVIDIA driver cannot list its GPUs (" + d.describe(code) + ")";
  else if (count == 0) found.absence = "the NVIDIA driver sees no GPU";
  for (int i = 0; i < count; i++) {
    auto context = std::make_shared<Context>(i);
    if (context->unsuitable().empty()) found.gpus.push_back(std::make_shared<Gpu>(context));
    else if (found.absence.empty()) found.absence = context->unsuitable();
  }
  if (!found.gpus.empty()) found.absence = "";
  return found;
}

const Found& found() {
  static const Found& result = *new Found(look());  // queues may outlive static destructors
  return result;
}

}  // namespace

std::vector<std::shared_ptr<metal::Backend>> backends() { return found().gpus; }
std::string absence() { return found().absence; }

}  // namespace lily::cuda

void lily_metal_absent_devices(void (*visit)(void*, const char*, const char*), void* context) {
  std::string reason = lily::cuda::absence();
  if (!reason.empty()) visit(context, "cuda", reason.c_str());
}
