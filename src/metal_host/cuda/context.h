// One GPU: its primary context, its memory, and whether an error has made it unusable.
#pragma once
#include <atomic>
#include <mutex>
#include <string>

#include "driver.h"

namespace lily::cuda {

class Context {
 public:
  explicit Context(int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const std::string& name() const { return name_; }          // of the GPU
  const std::string& architecture() const { return architecture_; }  // "sm_90"
  size_t total_memory() const { return total_; }
  const std::string& unsuitable() const { return unsuitable_; }  // why this GPU cannot run the kernels; empty: it can

  // Makes the context the calling thread's, creating it first. False: it cannot be; fault() says why.
  bool enter();
  size_t working_set();  // bytes that were free when the context was made, less a reserve for the driver

  // Notes what an operation returned. Errors that leave the context unusable stay: every later operation fails too.
  CUresult note(CUresult code);
  std::string fault() const;  // empty: usable
  bool has_fault() const { return faulty_.load(); }

 private:
  CUdevice device_ = 0;
  std::string name_, architecture_, unsuitable_;
  size_t total_ = 0, free_ = 0;
  std::mutex creation_;
  CUcontext context_ = nullptr;
  mutable std::mutex mutex_;
  std::atomic<bool> faulty_{false};
  std::string fault_;
};

}  // namespace lily::cuda
