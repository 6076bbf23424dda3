#include "library.h"

#include <cmath>
#include <stdexcept>

namespace lily {
namespace {

MTLLanguageVersion language(const std::string& version) {
  // By value: the version of the SDK in use must not decide which versions a newer system can compile.
  if (version == "3.1") return static_cast<MTLLanguageVersion>((3 << 16) + 1);
  if (version == "3.2") return static_cast<MTLLanguageVersion>((3 << 16) + 2);
  if (version == "4.0") return static_cast<MTLLanguageVersion>((4 << 16) + 0);
  throw std::invalid_argument("language version " + version + ": expected 3.1, 3.2 or 4.0");
}

NSString* string(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }

MTLCompileOptions* compile_options(const std::string& version) {
  MTLCompileOptions* options = [MTLCompileOptions new];
  options.languageVersion = language(version);
  if (@available(macOS 15.0, *)) {
    options.mathMode = MTLMathModeSafe;
  } else {
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wdeprecated-declarations"
    options.fastMathEnabled = NO;
#pragma clang diagnostic pop
  }
  return options;
}

void set_constant(MTLFunctionConstantValues* values, const FunctionConstant& constant) {
  auto integer = [&](double low, double high) {
    if (constant.value != std::floor(constant.value) || constant.value < low || constant.value > high)
      throw std::invalid_argument("function constant " + std::to_string(constant.index) + ": the value does not fit " + constant.type);
  };
  if (constant.type == "bool") {
    bool value = constant.value != 0;
    [values setConstantValue:&value type:MTLDataTypeBool atIndex:constant.index];
  } else if (constant.type == "int") {
    integer(-2147483648.0, 2147483647.0);
    int32_t value = static_cast<int32_t>(constant.value);
    [values setConstantValue:&value type:MTLDataTypeInt atIndex:constant.index];
  } else if (constant.type == "uint") {
    integer(0.0, 4294967295.0);
    uint32_t value = static_cast<uint32_t>(constant.value);
    [values setConstantValue:&value type:MTLDataTypeUInt atIndex:constant.index];
  } else if (constant.type == "float") {
    float value = static_cast<float>(constant.value);
    [values setConstantValue:&value type:MTLDataTypeFloat atIndex:constant.index];
  } else {
    throw std::invalid_argument("function constant " + std::to_string(constant.index) + " has type " + constant.type +
                                ": expected bool, int, uint or float");
  }
}

}  // namespace

Library::Library(std::shared_ptr<Device> device, const std::string& source, const std::string& label, const std::string& language_version)
    : label_(label) {
  device->check_usable();
  @autoreleasepool {
    NSError* error = nil;
    metal_ = [device->metal() newLibraryWithSource:string(source) options:compile_options(language_version) error:&error];
    // A set error may be only a warning: the library being nil is what counts.
    if (!metal_) throw DeviceError("kernel library " + label + ": " + describe(error));
    [metal_ setLabel:string(label)];
  }
}

std::vector<std::string> Library::function_names() const {
  @autoreleasepool {
    std::vector<std::string> names;
    for (NSString* name in [metal_ functionNames]) names.push_back([name UTF8String]);
    return names;
  }
}

Pipeline::Pipeline(const std::shared_ptr<Device>& device, const Library& library, const std::string& function,
                   const std::vector<FunctionConstant>& constants, const std::string& label)
    : name_(label.empty() ? function : label) {
  device->check_usable();
  @autoreleasepool {
    MTLFunctionConstantValues* values = [MTLFunctionConstantValues new];
    for (const FunctionConstant& constant : constants) set_constant(values, constant);
    NSError* error = nil;
    id<MTLFunction> compiled = [library.metal() newFunctionWithName:string(function) constantValues:values error:&error];
    if (!compiled) throw DeviceError("kernel " + function + " of library " + library.label() + ": " + describe(error));
    [compiled setLabel:string(name_)];
    error = nil;
    metal_ = [device->metal() newComputePipelineStateWithFunction:compiled error:&error];
    if (!metal_) throw DeviceError("pipeline " + name_ + ": " + describe(error));
    max_threads_ = [metal_ maxTotalThreadsPerThreadgroup];
    simd_width_ = [metal_ threadExecutionWidth];
    static_threadgroup_memory_ = [metal_ staticThreadgroupMemoryLength];
  }
  if (simd_width_ != 32) throw DeviceError("pipeline " + name_ + " runs simdgroups of " + std::to_string(simd_width_) + ", the kernels need 32");
}

}  // namespace lily
