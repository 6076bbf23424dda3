#pragma once
#include <string>

namespace lily::metal {
// Can this CPU (and its system) run kernels built for "x86-64-v3", "x86-64-v4" or "x86-64-v4-bf16"?
bool cpu_runs(const std::string& target);
}  // namespace lily::metal
