// The CUDA GPUs of this machine as backends of the software Metal.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../framework/backend.h"

namespace lily::cuda {

// One per GPU that can run the kernels, in the driver's order; the same objects each time.
std::vector<std::shared_ptr<metal::Backend>> backends();

// Why a CUDA device is not there; empty when there is one.
std::string absence();

}  // namespace lily::cuda

// Kinds of devices that this library knows and this machine lacks: calls `visit` with the kind and the reason.
extern "C" __attribute__((visibility("default"))) void lily_metal_absent_devices(void (*visit)(void* context, const char* kind, const char* reason),
                                                                                 void* context);
