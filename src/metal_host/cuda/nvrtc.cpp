#include "nvrtc.h"

#include <dlfcn.h>
#include <glob.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "../framework/kernel_binary.h"
#include "../framework/settings.h"
#include "../framework/support_text.h"
#include "driver.h"

namespace lily::cuda {
namespace {

typedef struct _nvrtcProgram* nvrtcProgram;

struct Nvrtc {
  std::string problem;
  const char* (*error_text)(int) = nullptr;
  int (*create)(nvrtcProgram*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  int (*destroy)(nvrtcProgram*) = nullptr;
  int (*compile)(nvrtcProgram, int, const char* const*) = nullptr;
  int (*log_size)(nvrtcProgram, size_t*) = nullptr;
  int (*log)(nvrtcProgram, char*) = nullptr;
  int (*code_size)(nvrtcProgram, size_t*) = nullptr;
  int (*code)(nvrtcProgram, char*) = nullptr;
};

std::vector<std::string> matches(const std::string& pattern) {
  std::vector<std::string> found;
  glob_t result = {};
  if (glob(pattern.c_str(), 0, nullptr, &result) == 0)
    for (size_t i = 0; i < result.gl_pathc; i++) found.push_back(result.gl_pathv[i]);
  globfree(&result);
  return found;
}

// Where Python packages lie: beside this one, in PYTHONPATH, below the interpreter's prefix.
std::vector<std::string> package_folders() {
  std::vector<std::string> folders = {metal::folder_of_this_library() + "/.."};
  std::istringstream path(getenv("PYTHONPATH") ? getenv("PYTHONPATH") : "");
  for (std::string entry; std::getline(path, entry, ':');)
    if (!entry.empty()) folders.push_back(entry);
  std::string program = metal::python_program();
  size_t slash = program.rfind('/');
  if (slash != std::string::npos)
    for (const char* kind : {"site-packages", "dist-packages"})
      for (const std::string& folder : matches(program.substr(0, slash) + "/../lib/python3*/" + kind)) folders.push_back(folder);
  return folders;
}

// The package's library, newest version first, else the system's; none that is newer than the driver, which may not load its code.
std::vector<std::string> candidates() {
  if (!metal::settings().nvrtc.empty()) return {metal::settings().nvrtc};
  std::vector<std::string> paths, versions = {"12"};
  if (driver().version >= 13000) versions.insert(versions.begin(), "13");
  for (const std::string& folder : package_folders())
    for (const std::string& version : versions)
      for (const std::string& path : matches(folder + "/nvidia/*/lib/libnvrtc.so." + version)) paths.push_back(path);
  for (const std::string& version : versions) paths.push_back("libnvrtc.so." + version);
  return paths;
}

Nvrtc load() {
  Nvrtc n;
  void* library = nullptr;
  for (const std::string& path : candidates())
    if ((library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL))) break;
  if (!library) {
    n.problem = "NVIDIA's run-time compiler NVRTC is not installed; pip install 'lily-metal[cuda]'";
    return n;
  }
  auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (!function) n.problem = std::string("NVRTC lacks ") + name + "; pip install 'lily-metal[cuda]'";
  };
  find(n.error_text, "nvrtcGetErrorString");
  find(n.create, "nvrtcCreateProgram");
  find(n.destroy, "nvrtcDestroyProgram");
  find(n.compile, "nvrtcCompileProgram");
  find(n.log_size, "nvrtcGetProgramLogSize");
  find(n.log, "nvrtcGetProgramLog");
  find(n.code_size, "nvrtcGetCUBINSize");
  find(n.code, "nvrtcGetCUBIN");
  return n;
}

const Nvrtc& nvrtc() {
  static const Nvrtc& loaded = *new Nvrtc(load());
  return loaded;
}

Cubin compile(const std::string& text, const std::vector<std::string>& options) {
  const Nvrtc& n = nvrtc();
  if (!n.problem.empty()) return {"", n.problem};
  std::vector<const char*> words;
  for (const std::string& option : options) words.push_back(option.c_str());
  nvrtcProgram program = nullptr;
  if (int code = n.create(&program, text.c_str(), "kernel.cu", 0, nullptr, nullptr)) return {"", std::string("NVRTC: ") + n.error_text(code)};
  Cubin result;
  int code = n.compile(program, static_cast<int>(words.size()), words.data());
  size_t size = 0;
  if (code) {
    n.log_size(program, &size);
    std::string log(size, 0);
    if (size) n.log(program, log.data());
    result.error = "NVRTC: " + std::string(n.error_text(code)) + "\n" + log.c_str();
  } else if (n.code_size(program, &size) || (result.image.resize(size), n.code(program, result.image.data()))) {
    result = {"", "NVRTC gave no machine code"};
  }
  n.destroy(&program);
  return result;
}

// A cache file is the SHA-256 of the machine code in hexadecimal, then the code.
std::string read_checked(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream bytes;
  bytes << file.rdbuf();
  std::string all = bytes.str();
  if (all.size() <= 64 || metal::sha256_hex(all.substr(64)) != all.substr(0, 64)) return "";
  return all.substr(64);
}

void write_checked(const std::string& path, const std::string& image) {
  static std::atomic<unsigned> serial{0};
  std::string part = path + "." + std::to_string(getpid()) + "." + std::to_string(serial++);
  {
    std::ofstream file(part, std::ios::binary);
    file << metal::sha256_hex(image) << image;
    if (!file.good()) {  // a full or read-only disk costs time at the next start, nothing else
      unlink(part.c_str());
      return;
    }
  }
  if (rename(part.c_str(), path.c_str())) unlink(part.c_str());
}

}  // namespace

Cubin compile_cached(const std::string& text, const std::string& identity, const std::vector<std::string>& options) {
  std::string key = identity;
  for (const std::string& option : options) key += " " + option;
  std::string folder = metal::cache_folder() + "/cuda", path = folder + "/" + metal::sha256_hex(key).substr(0, 32) + ".cubin";
  std::string image = read_checked(path);
  if (!image.empty()) return {image, ""};
  Cubin result = compile(text, options);
  if (!result.image.empty()) {
    metal::make_folders(folder);
    write_checked(path, result.image);
  }
  return result;
}

}  // namespace lily::cuda
