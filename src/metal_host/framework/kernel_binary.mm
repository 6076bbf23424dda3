#include "kernel_binary.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include "cpu.h"
#include "settings.h"
#include "support.h"

extern char** environ;

namespace lily::metal {

bool is_file(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

void make_folders(const std::string& path) {
  for (size_t at = 1; at != std::string::npos; at = path.find('/', at + 1)) mkdir(path.substr(0, at).c_str(), 0777);
  mkdir(path.c_str(), 0777);
}

std::string cache_folder() {
  const char* base = getenv("XDG_CACHE_HOME");
  const char* home = getenv("HOME");
  if (base && *base == '/') return std::string(base) + "/lily";
  return std::string(home && *home ? home : "/tmp") + "/.cache/lily";
}

// The interpreter that this extension runs in, so that the compiler is looked up where the user installed it.
std::string python_program() {
  using GetPath = const wchar_t* (*)();
  if (auto get = reinterpret_cast<GetPath>(dlsym(RTLD_DEFAULT, "Py_GetProgramFullPath"))) {
    const wchar_t* wide = get();
    std::string path;
    for (; wide && *wide; wide++) path += static_cast<char>(*wide);  // interpreters lie at ASCII paths; else the lookup below
    if (!path.empty() && access(path.c_str(), X_OK) == 0) return path;
  }
  return "python3";
}

namespace {

// Newest change below the front end: a cached binary made by an older compiler or library is not used.
time_t newest_change(const std::string& folder) {
  time_t newest = 0;
  DIR* dir = opendir(folder.c_str());
  if (!dir) return 0;
  while (dirent* entry = readdir(dir)) {
    std::string name = entry->d_name;
    if (name[0] == '.' || name == "__pycache__") continue;
    struct stat info;
    std::string path = folder + "/" + name;
    if (stat(path.c_str(), &info)) continue;
    time_t changed = S_ISDIR(info.st_mode) ? newest_change(path) : info.st_mtime;
    if (changed > newest) newest = changed;
  }
  closedir(dir);
  return newest;
}

// Runs a program to its end, its output collected. -1 when it cannot be started.
int run(const std::vector<std::string>& command, const std::string& log_path, std::string& output) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  pid_t pid = 0;
  int failed = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  int status = -1;
  if (failed) {
    output = command[0] + ": " + strerror(failed);
  } else {
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    std::ifstream log(log_path);
    std::stringstream text;
    text << log.rdbuf();
    output = text.str();
    while (!output.empty() && output.back() == '\n') output.pop_back();
  }
  unlink(log_path.c_str());
  if (failed) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

// The front end's output for the target: a shared library, or for "cuda" a .cu file with its manifest beside it.
KernelBinary compile(const std::string& text, const std::string& name, const std::string& target, bool instrumented) {
  std::string package = folder_of_this_library(), frontend = package + "/_metal_host/frontend/compile_text.py";
  if (!is_file(frontend)) return {"", "this kernel text has no built code and there is no front end at " + frontend};
  std::string cache = cache_folder();
  make_folders(cache);
  std::string stamp = std::to_string(static_cast<long long>(newest_change(package + "/_metal_host")));
  bool is_text = target == "cuda";
  std::string built = cache + "/" + name + "." + target + (instrumented ? ".strict." : ".") + stamp + (is_text ? ".cu" : ".so");
  if (is_file(built)) return {built, ""};

  std::string unique = built + "." + std::to_string(getpid()) + "." + std::to_string(reinterpret_cast<size_t>(&text) & 0xffff);
  std::string text_path = unique + ".metal", output;
  std::string out = is_text ? built : unique;  // text is put in place by the front end itself
  std::ofstream(text_path, std::ios::binary) << text;
  std::vector<std::string> command = {python_program(), frontend, "--text", text_path, "--out", out, "--target", target,
                                      "--name", "program_source"};
  if (instrumented) command.push_back("--strict");
  int code = run(command, unique + ".log", output);
  unlink(text_path.c_str());
  if (code == 0 && is_text && is_file(built)) return {built, ""};
  if (code == 0 && is_file(unique) && rename(unique.c_str(), built.c_str()) == 0) return {built, ""};
  unlink(unique.c_str());
  if (output.find("ziglang") != std::string::npos && output.find("No module named") != std::string::npos)
    return {"", "this kernel text has no built code, and the compiler for it (the Python package ziglang) is not installed"};
  return {"", output.empty() ? "the kernel compiler failed" : output};
}

}  // namespace

std::string kernel_target() {
  static const std::string target = [] {
    if (!settings().target.empty()) {
      if (!cpu_runs(settings().target))
        programming_error("LILY_METAL_HOST: target=%s is unknown, or this CPU lacks it", settings().target.c_str());
      return settings().target;
    }
    for (const char* candidate : {"x86-64-v4-bf16", "x86-64-v4"})
      if (cpu_runs(candidate)) return std::string(candidate);
    return std::string("x86-64-v3");
  }();
  return target;
}

KernelBinary find_kernel_binary(const std::string& text) {
  if (!cpu_runs("x86-64-v3")) return {"", "the software Metal needs a CPU with AVX2 and FMA (x86-64-v3)"};
  std::string name = sha256_hex(text).substr(0, 16);
  bool instrumented = settings().strict >= 2;
  if (!instrumented) {
    std::vector<std::string> targets = {kernel_target()};
    if (settings().target.empty()) targets.insert(targets.end(), {"x86-64-v4", "x86-64-v3"});  // a variant may not have been built
    for (const std::string& target : targets) {
      if (!cpu_runs(target)) continue;
      std::string path = folder_of_this_library() + "/_kernels/" + name + "." + target + ".so";
      if (is_file(path)) return {path, ""};
    }
  }
  return compile(text, name, kernel_target(), instrumented);
}

KernelBinary find_cuda_text(const std::string& text) {
  std::string name = sha256_hex(text).substr(0, 16);
  std::string path = folder_of_this_library() + "/_kernels/" + name + ".cu";
  if (is_file(path)) return {path, ""};
  return compile(text, name, "cuda", false);
}

}  // namespace lily::metal
