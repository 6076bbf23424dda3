// Libraries, functions and compute pipelines on kernels of a backend.
#pragma once
#import <Metal/Metal.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend.h"

@interface LilyPipeline : NSObject <MTLComputePipelineState> {
 @public
  std::shared_ptr<lily::metal::Kernel> kernel;
  const LilyKernelEntry* entry;
  uint32_t entry_index;
  std::vector<LilyConstantValue> constants;
  std::atomic<uint64_t> keeper;  // number of the command buffer that kept it last
}
@end

namespace lily::metal {
id<MTLLibrary> new_library(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, NSString* source, MTLCompileOptions* options,
                           NSError* __autoreleasing* error) NS_RETURNS_RETAINED;
id<MTLComputePipelineState> new_pipeline(const std::shared_ptr<Backend>& backend, id<MTLFunction> function,
                                           NSError* __autoreleasing* error) NS_RETURNS_RETAINED;
}  // namespace lily::metal
