#include "library.h"

#include <cstring>

#include "settings.h"
#include "support.h"

using namespace lily::metal;

NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

@implementation MTLCompileOptions
- (instancetype)init {
  self = [super init];
  _languageVersion = MTLLanguageVersion3_1;
  _mathMode = MTLMathModeFast;  // Apple's default; the kernels here are always built with safe math
  _fastMathEnabled = YES;
  return self;
}
- (id)copyWithZone:(NSZone*)zone {
  MTLCompileOptions* copy = [MTLCompileOptions new];
  copy.languageVersion = self.languageVersion;
  copy.mathMode = self.mathMode;
  copy.fastMathEnabled = self.fastMathEnabled;
  return copy;
}
@end

// ---- function constants

namespace {

struct TypeInfo {
  MTLDataType type;
  const char* name;
  uint32_t size;
};
const TypeInfo kTypes[] = {
    {MTLDataTypeBool, "bool", 1},   {MTLDataTypeChar, "char", 1},   {MTLDataTypeUChar, "uchar", 1},  {MTLDataTypeShort, "short", 2},
    {MTLDataTypeUShort, "ushort", 2}, {MTLDataTypeInt, "int", 4},   {MTLDataTypeUInt, "uint", 4},    {MTLDataTypeLong, "long", 8},
    {MTLDataTypeULong, "ulong", 8}, {MTLDataTypeHalf, "half", 2},   {MTLDataTypeBFloat, "bfloat", 2}, {MTLDataTypeFloat, "float", 4},
    {MTLDataTypeInt2, "int2", 8},   {MTLDataTypeInt3, "int3", 16},  {MTLDataTypeInt4, "int4", 16},   {MTLDataTypeUInt2, "uint2", 8},
    {MTLDataTypeUInt3, "uint3", 16}, {MTLDataTypeUInt4, "uint4", 16}, {MTLDataTypeFloat2, "float2", 8}, {MTLDataTypeFloat3, "float3", 16},
    {MTLDataTypeFloat4, "float4", 16},
};
struct ConstantSetting {
  const TypeInfo* type;
  unsigned char value[16];
};
ConstantSetting constant_setting(const void* value, MTLDataType type) {
  for (const TypeInfo& info : kTypes) {
    if (info.type != type) continue;
    ConstantSetting setting = {&info, {}};
    memcpy(setting.value, value, info.size == 16 && info.name[strlen(info.name) - 1] == '3' ? 12 : info.size);
    return setting;
  }
  programming_error("setConstantValue: data type %lu is not a scalar or vector of the subset", static_cast<unsigned long>(type));
}

}  // namespace

@interface MTLFunctionConstantValues () {
 @public
  std::map<NSUInteger, ConstantSetting> by_index;
  std::map<std::string, ConstantSetting> by_name;
}
@end

@implementation MTLFunctionConstantValues
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  by_index[index] = constant_setting(value, type);
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name {
  by_name[text_of(name)] = constant_setting(value, type);
}
- (void)reset {
  by_index.clear();
  by_name.clear();
}
- (id)copyWithZone:(NSZone*)zone {
  MTLFunctionConstantValues* copy = [MTLFunctionConstantValues new];
  copy->by_index = by_index;
  copy->by_name = by_name;
  return copy;
}
@end

// ---- library and function

@interface LilyLibrary : NSObject <MTLLibrary> {
 @public
  std::shared_ptr<KernelLibrary> kernels;
  const LilyKernelModule* description;
  id<MTLDevice> _device;
}
@property(copy, atomic) NSString* label;
@end

@interface LilyFunction : NSObject <MTLFunction> {
 @public
  LilyLibrary* library;
  uint32_t entry_index;
  std::vector<LilyConstantValue> constants;
}
@property(copy, atomic) NSString* label;
@end

@implementation LilyFunction
- (id<MTLDevice>)device {
  return library->_device;
}
- (NSString*)name {
  return lily::metal::string(library->description->entries[entry_index].name);
}
- (MTLFunctionType)functionType {
  return MTLFunctionTypeKernel;
}
@end

// The values in the order of the module's list, or a text that names what is missing or of the wrong type.
static std::string resolve_constants(const LilyKernelModule* module, MTLFunctionConstantValues* values, std::vector<LilyConstantValue>& out) {
  out.assign(module->constant_count, LilyConstantValue{});
  for (uint32_t i = 0; i < module->constant_count; i++) {
    const LilyFunctionConstant& wanted = module->constants[i];
    const ConstantSetting* setting = nullptr;
    if (values) {
      auto by_index = values->by_index.find(wanted.index);
      auto by_name = values->by_name.find(wanted.name);
      if (by_index != values->by_index.end()) setting = &by_index->second;
      else if (by_name != values->by_name.end()) setting = &by_name->second;
    }
    if (!setting) {
      if (wanted.required) return "function constant " + std::string(wanted.name) + " (index " + std::to_string(wanted.index) + ") has no value";
      continue;
    }
    if (strcmp(setting->type->name, wanted.type) != 0)
      return "function constant " + std::string(wanted.name) + " is " + wanted.type + " but was given as " + setting->type->name;
    memcpy(out[i].value, setting->value, sizeof out[i].value);
    out[i].defined = 1;
  }
  return "";
}

static int find_entry(const LilyKernelModule* module, const char* name) {
  for (uint32_t i = 0; i < module->entry_count; i++)
    if (strcmp(module->entries[i].name, name) == 0) return static_cast<int>(i);
  return -1;
}

@implementation LilyLibrary
@synthesize device = _device;
- (NSArray<NSString*>*)functionNames {
  std::vector<id> names;
  std::vector<id __unsafe_unretained> pointers;
  for (uint32_t i = 0; i < description->entry_count; i++) names.push_back(lily::metal::string(description->entries[i].name));
  for (id name : names) pointers.push_back(name);
  return [NSArray arrayWithObjects:pointers.data() count:pointers.size()];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name {
  return [self newFunctionWithName:name constantValues:nil error:nullptr];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name constantValues:(MTLFunctionConstantValues*)values error:(NSError* __autoreleasing*)error {
  int index = find_entry(description, [name UTF8String]);
  if (index < 0) {
    if (error) *error = make_error(MTLLibraryErrorDomain, MTLLibraryErrorFunctionNotFound, "function " + text_of(name) + " is not in the library");
    return nil;
  }
  LilyFunction* function = [LilyFunction new];
  function->library = self;
  function->entry_index = static_cast<uint32_t>(index);
  std::string problem = resolve_constants(description, values, function->constants);
  if (!problem.empty()) {
    if (error) *error = make_error(MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, text_of(name) + ": " + problem);
    return nil;
  }
  return function;
}
@end

// ---- pipeline

@implementation LilyPipeline {
 @public
  LilyFunction* _function;  // keeps the module open
}
- (NSString*)label {
  return [_function label];
}
- (id<MTLDevice>)device {
  return [_function device];
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return kernel->max_threads;
}
- (NSUInteger)threadExecutionWidth {
  return LILY_SIMD_WIDTH;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return kernel->static_bytes;
}
@end

namespace lily::metal {

id<MTLLibrary> new_library(id<MTLDevice> device, const std::shared_ptr<Backend>& backend, NSString* source, MTLCompileOptions* options,
                           NSError* __autoreleasing* error) {
  // Tensors came with Metal 4: the compiler has neither header for an older language version.
  MTLLanguageVersion version = options ? options.languageVersion : MTLLanguageVersion3_1;
  for (const char* header : {"<metal_tensor>", "<MetalPerformancePrimitives/MetalPerformancePrimitives.h>"}) {
    if (version >= MTLLanguageVersion4_0 || text_of(source).find(std::string("#include ") + header) == std::string::npos) continue;
    if (error)
      *error = make_error(MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, std::string(header) + " needs language version 4.0; the library asks for " +
                                                                                    std::to_string(version >> 16) + "." + std::to_string(version & 0xffff));
    return nil;
  }
  std::string problem;
  std::shared_ptr<KernelLibrary> kernels = backend->open_library(text_of(source), problem);
  if (!kernels) {
    if (error) *error = make_error(MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, problem);
    return nil;
  }
  LilyLibrary* library = [LilyLibrary new];
  library->kernels = kernels;
  library->description = kernels->description;
  library->_device = device;
  return library;
}

id<MTLComputePipelineState> new_pipeline(const std::shared_ptr<Backend>& backend, id<MTLFunction> generic, NSError* __autoreleasing* error) {
  if (!generic) programming_error("newComputePipelineStateWithFunction: the function is nil");
  LilyFunction* function = (LilyFunction*)generic;
  LilyPipeline* pipeline = [LilyPipeline new];
  pipeline->_function = function;
  pipeline->entry_index = function->entry_index;
  pipeline->entry = &function->library->description->entries[function->entry_index];
  pipeline->constants = function->constants;
  std::string problem;
  pipeline->kernel = backend->make_kernel(function->library->kernels, function->entry_index, function->constants, problem);
  if (pipeline->kernel && pipeline->kernel->static_bytes > LILY_THREADGROUP_LIMIT)
    problem = "threadgroup memory of " + std::to_string(pipeline->kernel->static_bytes) + " bytes exceeds the maximum of " +
              std::to_string(LILY_THREADGROUP_LIMIT);
  if (!problem.empty()) {
    if (error) *error = make_error(MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, std::string(pipeline->entry->name) + ": " + problem);
    return nil;
  }
  return pipeline;
}

}  // namespace lily::metal
