#include "kernel.h"

#include <cstring>
#include <fstream>
#include <sstream>

#include "../framework/kernel_binary.h"
#include "json.h"
#include "nvrtc.h"

namespace lily::cuda {
namespace {

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

unsigned size_of(const std::string& type) {
  for (const char* eight : {"long", "ulong"})
    if (type == eight) return 8;
  for (const char* four : {"int", "uint", "float"})
    if (type == four) return 4;
  for (const char* two : {"short", "ushort", "half", "bfloat"})
    if (type == two) return 2;
  return type == "bool" || type == "char" || type == "uchar" ? 1 : 0;  // 0: a vector
}

}  // namespace

std::shared_ptr<Library> Library::open(const std::string& text, std::string& error) {
  metal::KernelBinary found = metal::find_cuda_text(text);
  error = found.error;
  if (found.path.empty()) return nullptr;
  auto library = std::make_shared<Library>();
  library->code_ = contents(found.path);
  std::string manifest = found.path.substr(0, found.path.size() - 3) + ".cuda.json";
  if (library->code_.empty() || !library->read_manifest(contents(manifest))) {
    error = manifest + " is missing or damaged; install lily again";
    return nullptr;
  }
  return library;
}

bool Library::read_manifest(const std::string& text) {
  Json manifest;
  if (!parse_json(text, manifest) || manifest.at("entries").items.empty()) return false;
  identity_ = manifest.at("hash").text;
  for (const Json& c : manifest.at("constants").items)
    constants_.push_back({keep(c.at("name").text), keep(c.at("type").text), c.at("index").whole(), size_of(c.at("type").text), c.at("required").whole()});
  for (const Json& e : manifest.at("entries").items) {
    std::vector<LilyParameter>& parameters = parameters_.emplace_back();
    std::vector<InlinePlace>& places = places_.emplace_back();
    for (const Json& a : e.at("arguments").items) {
      const std::string& kind = a.at("kind").text;
      bool threadgroup = kind == "threadgroup";
      parameters.push_back({keep(a.at("name").text), threadgroup ? LILY_PARAMETER_THREADGROUP : LILY_PARAMETER_BUFFER, a.at("index").whole(),
                            threadgroup ? LILY_SPACE_THREADGROUP : kind == "constant" ? LILY_SPACE_CONSTANT : LILY_SPACE_DEVICE,
                            a.at("writable").whole(), a.at("size").whole(), a.at("align").whole()});
      if (parameters.back().index >= (threadgroup ? kThreadgroupArguments : LILY_MAX_BUFFERS)) return false;
      if (!a.at("by_value").whole()) continue;
      places.push_back({a.at("index").whole(), a.at("inline_offset").whole(), a.at("size").whole()});
      if (places.back().offset + places.back().size > kInlineBytes) return false;
    }
    symbols_.push_back(e.at("symbol").text);
    entries_.push_back({keep(e.at("name").text), nullptr, e.at("max_threads").whole(), e.at("line").whole(), parameters.data(),
                        static_cast<uint32_t>(parameters.size()), 0});
  }
  module_.abi = LILY_ENGINE_ABI;
  module_.source = keep(manifest.at("source").text);
  module_.entries = entries_.data();
  module_.entry_count = static_cast<uint32_t>(entries_.size());
  module_.constants = constants_.data();
  module_.constant_count = static_cast<uint32_t>(constants_.size());
  description = &module_;
  return !identity_.empty();
}

GpuKernel::GpuKernel(std::shared_ptr<Context> context, std::shared_ptr<Library> library, uint32_t entry,
                     const std::vector<LilyConstantValue>& constants)
    : context_(std::move(context)), library_(std::move(library)), entry_(entry) {
  options_ = {"-std=c++17", "-default-device", "-arch=" + context_->architecture(), "-DLILY_ENTRY_" + library_->symbol(entry)};
  for (size_t i = 0; i < constants.size(); i++) {
    if (!constants[i].defined) continue;
    const LilyFunctionConstant& constant = library_->description->constants[i];
    uint64_t bits = 0;
    memcpy(&bits, constants[i].value, constant.size);
    std::string name = "-DLILY_FC_" + std::to_string(constant.index);
    options_.push_back(name + "=" + std::to_string(bits) + (constant.size == 8 ? "ul" : "u"));
    options_.push_back(name + "_SET=1");
  }
}

GpuKernel::~GpuKernel() {
  if (!context_->enter()) return;  // a lost context has lost its modules too
  for (CUmodule module : modules_)
    if (module) driver().cuModuleUnload(module);
}

CUfunction GpuKernel::function(bool ragged, std::string& error) {
  if (CUfunction found = functions_[ragged].load()) return found;
  std::lock_guard<std::mutex> lock(mutex_);
  if (CUfunction found = functions_[ragged].load()) return found;
  std::vector<std::string> options = options_;
  if (ragged) options.push_back("-DLILY_RAGGED=1");
  Cubin cubin = compile_cached(library_->code(), library_->identity(), options);
  error = cubin.error;
  if (cubin.image.empty()) return nullptr;
  const Driver& d = driver();
  if (!context_->enter()) {
    error = context_->fault();
    return nullptr;
  }
  CUfunction function = nullptr;
  CUresult code = context_->note(d.cuModuleLoadData(&modules_[ragged], cubin.image.data()));
  if (!code) code = d.cuModuleGetFunction(&function, modules_[ragged], library_->symbol(entry_).c_str());
  int bytes = 0, threads = 0;
  if (!code) code = d.cuFuncGetAttribute(&bytes, kSharedSizeBytes, function);
  if (!code) code = d.cuFuncGetAttribute(&threads, kMaxThreadsPerBlock, function);
  if (code) {
    error = "the machine code cannot be loaded (" + d.describe(code) + ")";
    return nullptr;
  }
  if (!ragged) {
    static_bytes = static_cast<uint32_t>(bytes);
    max_threads = std::min(entry().max_threads, static_cast<uint32_t>(threads));
  }
  functions_[ragged].store(function);
  return function;
}

}  // namespace lily::cuda
