// NVIDIA's run-time compiler: CUDA C++ text to machine code, kept on disk.
#pragma once
#include <string>
#include <vector>

namespace lily::cuda {

struct Cubin {
  std::string image;  // empty: it did not compile
  std::string error;  // then why
};

// Machine code of one text with these options, from the disk cache ($XDG_CACHE_HOME/lily/cuda) or compiled. `identity`
// stands for the text (its hash) in the cache's key. Any thread may call it.
Cubin compile_cached(const std::string& text, const std::string& identity, const std::vector<std::string>& options);

}  // namespace lily::cuda
