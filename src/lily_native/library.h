// Kernel libraries compiled from source text, and pipelines made of their functions.
#pragma once
#import <Metal/Metal.h>

#include <memory>
#include <string>
#include <vector>

#include "device.h"

namespace lily {

class Library {
 public:
  // language_version: "3.1", "3.2" or "4.0". Always compiled with safe math: fast math assumes that no NaN and no
  // infinity exists, and the kernels mask with -infinity.
  Library(std::shared_ptr<Device> device, const std::string& source, const std::string& label, const std::string& language_version);
  id<MTLLibrary> metal() const { return metal_; }
  const std::string& label() const { return label_; }
  std::vector<std::string> function_names() const;

 private:
  id<MTLLibrary> metal_;
  std::string label_;
};

struct FunctionConstant {
  unsigned index;
  std::string type;  // "bool", "int", "uint", "float"
  double value;
};

class Pipeline {
 public:
  Pipeline(const std::shared_ptr<Device>& device, const Library& library, const std::string& function,
           const std::vector<FunctionConstant>& constants, const std::string& label);
  id<MTLComputePipelineState> metal() const { return metal_; }
  const std::string& name() const { return name_; }
  size_t max_threads() const { return max_threads_; }
  size_t simd_width() const { return simd_width_; }
  size_t static_threadgroup_memory() const { return static_threadgroup_memory_; }

 private:
  id<MTLComputePipelineState> metal_;
  std::string name_;
  size_t max_threads_, simd_width_, static_threadgroup_memory_;
};

}  // namespace lily
