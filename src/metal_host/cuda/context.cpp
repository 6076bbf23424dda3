#include "context.h"

#include <initializer_list>

namespace lily::cuda {
namespace {

constexpr size_t kReserve = size_t(512) << 20;  // code, local memory and graphs, which the driver takes by itself

// After these the driver answers every call of the process for this context with the same error.
bool is_sticky(CUresult code) {
  for (CUresult sticky : {4, 46, 101, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
    if (code == sticky) return true;
  return false;
}

}  // namespace

Context::Context(int ordinal) {
  const Driver& d = driver();
  char name[256] = "GPU";
  int major = 0, minor = 0;
  if (CUresult code = d.cuDeviceGet(&device_, ordinal)) {
    unsuitable_ = "GPU " + std::to_string(ordinal) + " cannot be used (" + d.describe(code) + ")";
    return;
  }
  d.cuDeviceGetName(name, sizeof name, device_);
  d.cuDeviceGetAttribute(&major, kComputeMajor, device_);
  d.cuDeviceGetAttribute(&minor, kComputeMinor, device_);
  d.cuDeviceTotalMem_v2(&total_, device_);
  name_ = name;
  architecture_ = "sm_" + std::to_string(major) + std::to_string(minor);
  if (major < 8)
    unsuitable_ = name_ + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                  ", the kernels need 8.0 (matrix units for bf16)";
}

Context::~Context() {
  if (context_) driver().cuDevicePrimaryCtxRelease_v2(device_);
}

bool Context::enter() {
  const Driver& d = driver();
  std::lock_guard<std::mutex> lock(creation_);
  if (!context_) {
    if (CUresult code = d.cuDevicePrimaryCtxRetain(&context_, device_)) {
      context_ = nullptr;
      std::lock_guard<std::mutex> lock(mutex_);
      fault_ = "the GPU gives no context (" + d.describe(code) + ")";
      faulty_ = true;
      return false;
    }
    size_t total = 0;
    d.cuCtxSetCurrent(context_);
    if (note(d.cuMemGetInfo_v2(&free_, &total))) free_ = 0;
  }
  return note(d.cuCtxSetCurrent(context_)) == kSuccess;
}

size_t Context::working_set() {
  if (!enter()) return 0;
  return free_ > kReserve ? free_ - kReserve : 0;
}

CUresult Context::note(CUresult code) {
  if (code == kSuccess || !is_sticky(code)) return code;
  std::lock_guard<std::mutex> lock(mutex_);
  if (fault_.empty()) fault_ = driver().describe(code);
  faulty_ = true;
  return code;
}

std::string Context::fault() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return fault_;
}

}  // namespace lily::cuda
