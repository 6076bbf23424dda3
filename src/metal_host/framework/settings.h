// LILY_METAL_HOST=key=value,… : how the software Metal behaves. Read once, when the first device is made.
#pragma once
#include <cstdint>
#include <string>

#include "../simt/engine.h"

namespace lily::metal {

struct Settings {
  uint32_t workers = 0;      // 0 = all cores
  uint32_t order = LILY_ORDER_FORWARD;
  uint64_t seed = 0;
  int strict = 0;            // 0 fast, 1 poisoned and guarded buffers and simd checks, 2 also instrumented kernels
  int family = 10;           // impersonated Apple GPU family: 7 = M1 … 10 = M5, whose tensor operations the CPU has too
  uint32_t max_threads = LILY_MAX_THREADS;  // impersonated limit of every pipeline
  std::string target;        // instruction set variant of the kernels; empty = the best one that the CPU has
  bool hazards = false;      // every dispatch's accesses are recorded, unordered dispatches that conflict fail; needs strict=2
  std::string cuda_driver;   // library to load instead of the NVIDIA driver's
  std::string nvrtc;         // library to load instead of the first NVRTC found
  uint64_t faults = 0;       // of so many command buffers one fails, chosen at random; 0 = none
  bool poison = false;       // threadgroup memory and new shared buffers start as NaN

  bool reorders() const { return order != LILY_ORDER_FORWARD; }
  LilyOptions engine_options() const;
};

const Settings& settings();  // aborts with one line when the variable is malformed

}  // namespace lily::metal
