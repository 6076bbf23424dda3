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

// The same for the CUDA device: the path of a .cu text, whose manifest lies beside it as .cuda.json.
KernelBinary find_cuda_text(const std::string& text);

bool is_file(const std::string& path);
void make_folders(const std::string& path);
std::string cache_folder();    // $XDG_CACHE_HOME/lily or ~/.cache/lily
std::string python_program();  // the interpreter that this library runs in

std::string kernel_target();  // instruction set variant in use

}  // namespace lily::metal
