// Libraries, functions and compute pipelines on modules of the SIMT engine.
#pragma once
#import <Metal/Metal.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../simt/engine.h"

@interface LilyPipeline : NSObject <MTLComputePipelineState> {
 @public
  const LilyModule* module;
  const LilyKernelEntry* entry;
  uint32_t entry_index;
  std::vector<LilyConstantValue> constants;
  uint32_t max_threads, static_bytes;
}
@end

namespace lily::metal {
id<MTLLibrary> new_library(id<MTLDevice> device, NSString* source, MTLCompileOptions* options, NSError* __autoreleasing* error) NS_RETURNS_RETAINED;
id<MTLComputePipelineState> new_pipeline(id<MTLDevice> device, id<MTLFunction> function, NSError* __autoreleasing* error) NS_RETURNS_RETAINED;
}  // namespace lily::metal
