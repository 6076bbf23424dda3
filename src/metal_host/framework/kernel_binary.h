// Finds, or makes, the machine code of a kernel source text.
#pragma once
#include <string>

namespace lily::metal {

struct KernelBinary {
  std::string path;   // empty: not to be had
  std::string error;  // then why not
};
// Built at install time: lily/_kernels/<first 16 hex of SHA-256(text)>.<target>.so. Anything else is compiled by the
// Python front end when ziglang can be imported, and kept under $XDG_CACHE_HOME/lily.
KernelBinary find_kernel_binary(const std::string& text);

std::string kernel_target();  // instruction set variant in use

}  // namespace lily::metal
