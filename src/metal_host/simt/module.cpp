// Kernel modules: opening, connecting to the engine, sizes of threadgroup variables, and the C library
// functions that kernel code may ask for.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <dlfcn.h>
#include <link.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "fiber.h"
#include "worker.h"

struct LilyModule {
  void *handle;
  const LilyKernelModule *description;
  std::map<std::string, int> by_name;
  std::vector<uint32_t> threadgroup_bytes;      // per entry
  uint64_t first, last;                         // address range of the loaded image
};

namespace lily {
namespace {

uint64_t threadgroup_object(uint32_t number, uint64_t bytes, uint64_t align) {
  Worker *w = worker_here();
  if (number >= LILY_MAX_THREADGROUP_OBJECTS) fail(w, "more than %d threadgroup variables in one file", LILY_MAX_THREADGROUP_OBJECTS);
  return w->threadgroup_object[number] = place_threadgroup_object(w, bytes, align);
}

void fail_text(uint64_t message) { fail(worker_here(), "%s", reinterpret_cast<const char *>(message)); }

LilyEngineTable engine_table() {
  LilyEngineTable t = {};
  t.rendezvous = rendezvous;
  t.threadgroup = threadgroup_object;
  t.access = check_access;
  t.fail = fail_text;
  t.sin = sinf; t.cos = cosf; t.tan = tanf;
  t.asin = asinf; t.acos = acosf; t.atan = atanf;
  t.sinh = sinhf; t.cosh = coshf;
  t.asinh = asinhf; t.acosh = acoshf; t.atanh = atanhf;
  t.pow = powf; t.fmod = fmodf; t.atan2 = atan2f; t.nextafter = nextafterf;
  return t;
}

// Adds up, per entry, the threadgroup variables whose code was compiled into it (see kernel_abi.h).
std::vector<uint32_t> static_threadgroup_bytes(const LilyKernelModule &module) {
  std::map<uint64_t, uint32_t> entry_of;                       // start of code -> entry
  for (uint32_t i = 0; i < module.entry_count; i++) entry_of[reinterpret_cast<uint64_t>(module.entries[i].function)] = i;
  std::vector<uint32_t> bytes(module.entry_count, 0);
  std::set<std::pair<uint32_t, int32_t>> seen;                 // a declaration may have been duplicated by the optimiser
  for (const int32_t *record = module.threadgroup_records; record < module.threadgroup_records_end; record += 3) {
    const uint64_t code = reinterpret_cast<uint64_t>(record) + int64_t(record[0]);
    auto after = entry_of.upper_bound(code);
    if (after == entry_of.begin()) continue;
    const uint32_t entry = std::prev(after)->second;
    if (seen.insert({entry, record[1]}).second) bytes[entry] += (uint32_t(record[2]) + 15) & ~15u;
  }
  return bytes;
}

int find_image(dl_phdr_info *info, size_t, void *argument) {
  LilyModule *m = static_cast<LilyModule *>(argument);
  const uint64_t inside = reinterpret_cast<uint64_t>(m->description);
  uint64_t first = ~0ull, last = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uint64_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    if (start < first) first = start;
    if (start + info->dlpi_phdr[i].p_memsz > last) last = start + info->dlpi_phdr[i].p_memsz;
  }
  if (inside < first || inside >= last) return 0;
  m->first = first;
  m->last = last;
  return 1;
}

}  // namespace

bool module_owns(const LilyModule *m, uint64_t address) { return address >= m->first && address < m->last; }

}  // namespace lily

LilyModule *lily_simt_open(const char *path, char *error, size_t error_size) {
  void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    snprintf(error, error_size, "%s", dlerror());
    return nullptr;
  }
  const LilyKernelModule *description = static_cast<const LilyKernelModule *>(dlsym(handle, "lily_kernel_module"));
  if (!description || description->abi != LILY_ENGINE_ABI) {
    if (description) snprintf(error, error_size, "%s: built for engine version %u, this is version %u", path, description->abi, LILY_ENGINE_ABI);
    else snprintf(error, error_size, "%s: not a kernel module", path);
    dlclose(handle);
    return nullptr;
  }
  *description->table = lily::engine_table();
  LilyModule *m = new LilyModule{handle, description, {}, lily::static_threadgroup_bytes(*description), 0, 0};
  for (uint32_t i = 0; i < description->entry_count; i++) m->by_name[description->entries[i].name] = int(i);
  dl_iterate_phdr(lily::find_image, m);
  return m;
}

void lily_simt_close(LilyModule *m) {
  if (!m) return;
  dlclose(m->handle);
  delete m;
}

const LilyKernelModule *lily_simt_describe(const LilyModule *m) { return m->description; }

int lily_simt_find(const LilyModule *m, const char *name) {
  auto found = m->by_name.find(name);
  return found == m->by_name.end() ? -1 : found->second;
}

uint32_t lily_simt_static_threadgroup_bytes(const LilyModule *m, uint32_t entry) {
  return entry < m->threadgroup_bytes.size() ? m->threadgroup_bytes[entry] : 0;
}

#if defined(__x86_64__)
namespace {
// Asks the processor itself: the compiler's own feature table is not part of every runtime library.
struct Processor {
  uint32_t basic_c = 0, wide_b = 0, wide_c = 0, more_a = 0, state = 0;
  Processor() {
    uint32_t a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) basic_c = c;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) wide_b = b, wide_c = c;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) more_a = a;
    if (basic_c >> 27 & 1) asm("xgetbv" : "=a"(state), "=d"(d) : "c"(0));      // what the system saves on a switch
  }
  bool v3() const {
    const uint32_t basic = 1u << 12 | 1u << 22 | 1u << 28 | 1u << 29;          // fma movbe avx f16c
    const uint32_t wide = 1u << 3 | 1u << 5 | 1u << 8;                         // bmi1 avx2 bmi2
    return (basic_c & basic) == basic && (wide_b & wide) == wide && (state & 6) == 6;
  }
  bool v4() const {
    const uint32_t wide = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;   // avx512 f dq cd bw vl
    return v3() && (wide_b & wide) == wide && (state & 0xe6) == 0xe6;
  }
  bool v4_bf16() const {
    const uint32_t wide = 1u << 1 | 1u << 6 | 1u << 11;                        // vbmi vbmi2 vnni
    return v4() && (wide_c & wide) == wide && (more_a >> 5 & 1);
  }
};
}  // namespace
#endif

int lily_simt_cpu_has(const char *target) {
#if defined(__x86_64__)
  static const Processor processor;
  if (!strcmp(target, "x86-64-v3")) return processor.v3();
  if (!strcmp(target, "x86-64-v4")) return processor.v4();
  if (!strcmp(target, "x86-64-v4-bf16")) return processor.v4_bf16();
#endif
  return 0;
}
