#include "driver.h"

#include <dlfcn.h>

#include "../framework/settings.h"

namespace lily::cuda {
namespace {

Driver load() {
  Driver d;
  const std::string& named = metal::settings().cuda_driver;
  std::string path = named.empty() ? "libcuda.so.1" : named;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* reason = dlerror();
    d.problem = "the NVIDIA driver's library cannot be loaded (" + std::string(reason ? reason : path) + "); install the NVIDIA driver";
    return d;
  }
#define X(name, parameters)                                                             \
  d.name = reinterpret_cast<CUresult(*) parameters>(dlsym(library, #name));             \
  if (!d.name && d.problem.empty()) d.problem = "the NVIDIA driver is too old: " #name " is missing; install one for CUDA 12 or newer";
  LILY_CUDA_FUNCTIONS(X)
#undef X
  if (!d.problem.empty()) return d;
  d.cuDriverGetVersion(&d.version);
  if (CUresult code = d.cuInit(0)) d.problem = "the NVIDIA driver does not start (" + d.describe(code) + ")";
  return d;
}

}  // namespace

std::string Driver::describe(CUresult code) const {
  const char *name = nullptr, *text = nullptr;
  if (!cuGetErrorName || cuGetErrorName(code, &name) || !name) return "CUDA error " + std::to_string(code);
  if (cuGetErrorString(code, &text) || !text) return name;
  return std::string(name) + ": " + text;
}

const Driver& driver() {
  static const Driver& loaded = *new Driver(load());  // threads of queues use it until the process ends
  return loaded;
}

}  // namespace lily::cuda
