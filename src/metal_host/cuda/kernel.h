// Kernels on a GPU: a manifest as the framework's description, modules compiled on demand.
#pragma once
#include <deque>
#include <mutex>

#include "../framework/backend.h"
#include "context.h"

namespace lily::cuda {

constexpr unsigned kInlineBytes = 320, kThreadgroupArguments = 8;

// What a kernel is given: LilyLaunch of stdlib/cuda/entry.h.
struct Launch {
  uint64_t buffer[LILY_MAX_BUFFERS];
  uint32_t inline_mask, grid_threads[3], grid_groups[3], threadgroup_offset[kThreadgroupArguments];
  alignas(16) unsigned char bytes[kInlineBytes];
};
static_assert(sizeof(Launch) == 640 && offsetof(Launch, bytes) == 320);

// Place of a by-value argument in Launch.bytes.
struct InlinePlace {
  unsigned index, offset, size;
};

class Library : public metal::KernelLibrary {
 public:
  // Null and a message when the text has no translation.
  static std::shared_ptr<Library> open(const std::string& text, std::string& error);
  const std::string& code() const { return code_; }
  const std::string& identity() const { return identity_; }
  const std::string& symbol(uint32_t entry) const { return symbols_[entry]; }
  const std::vector<InlinePlace>& places(uint32_t entry) const { return places_[entry]; }

 private:
  bool read_manifest(const std::string& text);
  const char* keep(const std::string& text) { return texts_.emplace_back(text).c_str(); }

  std::string code_, identity_;
  LilyKernelModule module_ = {};
  std::vector<LilyKernelEntry> entries_;
  std::deque<std::vector<LilyParameter>> parameters_;
  std::vector<LilyFunctionConstant> constants_;
  std::vector<std::string> symbols_;
  std::vector<std::vector<InlinePlace>> places_;
  std::deque<std::string> texts_;
};

class GpuKernel : public metal::Kernel {
 public:
  GpuKernel(std::shared_ptr<Context> context, std::shared_ptr<Library> library, uint32_t entry, const std::vector<LilyConstantValue>& constants);
  ~GpuKernel() override;

  // The variant for full simdgroups or for ragged ones, compiled and loaded on first use. Null and a message on failure.
  CUfunction function(bool ragged, std::string& error);
  const LilyKernelEntry& entry() const { return library_->description->entries[entry_]; }
  const std::vector<InlinePlace>& places() const { return library_->places(entry_); }

 private:
  std::shared_ptr<Context> context_;
  std::shared_ptr<Library> library_;
  uint32_t entry_;
  std::vector<std::string> options_;
  std::mutex mutex_;
  CUmodule modules_[2] = {};
  std::atomic<CUfunction> functions_[2] = {};
};

}  // namespace lily::cuda
