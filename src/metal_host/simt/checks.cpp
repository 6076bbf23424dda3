// What a kernel may touch: the fault handler turns a bad access of a lane into an error of the dispatch,
// and strict modules report every load and store here before it happens.
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include <mutex>

#include "recorder.h"
#include "worker.h"

namespace lily {
namespace {

struct sigaction previous_segv, previous_bus;
thread_local uint64_t fault_address __attribute__((tls_model("initial-exec")));

// The interrupted lane continues here, on its own stack, and leaves the threadgroup.
[[noreturn]] void report_fault() {
  Worker *w = worker_here();
  const uint64_t objects = reinterpret_cast<uint64_t>(w->base()) + kObjectsOffset;
  if (fault_address >= objects && fault_address < objects + kObjectSlots * kObjectSlot) {
    const uint64_t slot = (fault_address - objects) / kObjectSlot;
    const uint64_t bytes = slot < w->object_count ? w->objects[slot].bytes : 0;
    fail(w, "threadgroup memory overrun: access %llu bytes behind a threadgroup object of %llu bytes",
         (unsigned long long)(fault_address - (objects + (slot + 1) * kObjectSlot - kPage)), (unsigned long long)bytes);
  }
  for (int i = 0; i < LILY_MAX_BUFFERS; i++) {
    const LilyBinding &b = w->dispatch->buffers[i];
    const uint64_t end = reinterpret_cast<uint64_t>(b.address) + b.length;
    if (b.address && fault_address >= end && fault_address < end + (1 << 20))
      fail(w, "access to unmapped memory at %p, %llu bytes behind the end of buffer %d", (void *)fault_address, (unsigned long long)(fault_address - end), i);
  }
  if (!fault_address) fail(w, "access to unmapped memory or misaligned vector access (a buffer that is not bound?)");
  fail(w, "access to unmapped memory at %p%s", (void *)fault_address, fault_address < kPage ? " (a buffer that is not bound?)" : "");
}

void forward(const struct sigaction &previous, int number, siginfo_t *info, void *context) {
  if (previous.sa_flags & SA_SIGINFO) { previous.sa_sigaction(number, info, context); return; }
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) { previous.sa_handler(number); return; }
  signal(number, SIG_DFL);             // the instruction faults again and ends the process as usual
}

bool is_worker_stack(uint64_t stack);

void on_fault(int number, siginfo_t *info, void *context) {
#if defined(__x86_64__)
  greg_t *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
  const uint64_t stack = uint64_t(registers[REG_RSP]);
  if (is_worker_stack(stack)) {
    fault_address = reinterpret_cast<uint64_t>(info->si_addr);
    registers[REG_RSP] = greg_t(((stack - 256) & ~15ull) - 8);
    registers[REG_RIP] = reinterpret_cast<greg_t>(&report_fault);
    return;
  }
#endif
  forward(number == SIGBUS ? previous_bus : previous_segv, number, info, context);
}

// Known regions, for the signal handler; 0 where a worker has gone.
constexpr int kMaxRegions = 1024;
uint64_t regions[kMaxRegions];
int region_count = 0;
std::mutex region_mutex;

bool is_worker_stack(uint64_t stack) {
  const uint64_t base = stack & ~(LILY_REGION_BYTES - 1);
  const int count = __atomic_load_n(&region_count, __ATOMIC_ACQUIRE);
  for (int i = 0; i < count; i++)
    if (regions[i] == base) return stack - base >= kStacksOffset && stack - base < kObjectsOffset;
  return false;
}

bool inside(uint64_t address, uint32_t bytes, uint64_t start, uint64_t length) {
  return address >= start && address + bytes <= start + length;
}

}  // namespace

void register_region(Worker *w) {
  std::lock_guard<std::mutex> lock(region_mutex);
  int slot = 0;
  while (slot < region_count && regions[slot]) slot++;
  if (slot == kMaxRegions) return;
  regions[slot] = reinterpret_cast<uint64_t>(w->base());
  if (slot == region_count) __atomic_store_n(&region_count, region_count + 1, __ATOMIC_RELEASE);
}

void forget_region(Worker *w) {
  std::lock_guard<std::mutex> lock(region_mutex);
  for (int i = 0; i < region_count; i++)
    if (regions[i] == reinterpret_cast<uint64_t>(w->base())) regions[i] = 0;
}

void install_fault_handler() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGBUS, &action, &previous_bus);
  });
}

void check_access(uint64_t address, uint32_t bytes, uint32_t kind) {
  Worker *w = worker_here();
  const uint32_t store = kind & LILY_ACCESS_STORE;
  const char *what = store ? "store" : "load";
  if (!(kind & LILY_ACCESS_PACKED) && (address & (bytes - 1)))
    fail(w, "misaligned %s of %u bytes at %p", what, bytes, (void *)address);
  const uint64_t base = reinterpret_cast<uint64_t>(w->base());
  if (inside(address, bytes, base, kObjectsOffset)) return;                 // lane stacks and the header
  if (address - base < LILY_REGION_BYTES) {
    for (uint32_t i = 0; i < w->object_count; i++)
      if (inside(address, bytes, w->objects[i].address, w->objects[i].bytes)) return;
    fail(w, "%s of %u bytes outside every threadgroup object", what, bytes);
  }
  for (uint32_t n = 0; n < LILY_MAX_BUFFERS; n++) {                         // the buffer of the last access first
    const uint32_t i = (w->last_buffer + n) % LILY_MAX_BUFFERS;
    const LilyBinding &b = w->dispatch->buffers[i];
    if (!b.address || !inside(address, bytes, reinterpret_cast<uint64_t>(b.address), b.length)) continue;
    w->last_buffer = i;
    if (w->recorder) w->recorder->note(address, bytes, store);
    return;
  }
  if (!store && inside(address, bytes, w->zeros, kPage)) return;
  if (module_owns(w->dispatch->module, address)) return;                    // tables in the code itself
  if (inside(address, bytes, reinterpret_cast<uint64_t>(w->dispatch), sizeof(LilyDispatch))) return;    // addresses of arguments
  if (address - reinterpret_cast<uint64_t>(w->dispatch->constants) < w->module->constant_count * sizeof(LilyConstantValue)) return;
  int nearest = -1;
  uint64_t distance = ~0ull;
  for (int i = 0; i < LILY_MAX_BUFFERS; i++) {
    const LilyBinding &b = w->dispatch->buffers[i];
    const uint64_t start = reinterpret_cast<uint64_t>(b.address);
    if (!b.address) continue;
    const uint64_t d = address >= start ? address + bytes - (start + b.length) : start - address;
    if (d < distance) { distance = d; nearest = i; }
  }
  if (nearest >= 0) {
    const LilyBinding &b = w->dispatch->buffers[nearest];
    fail(w, "%s of %u bytes outside every bound buffer (nearest: buffer %d of %llu bytes, at offset %lld)", what, bytes, nearest,
         (unsigned long long)b.length, (long long)(address - reinterpret_cast<uint64_t>(b.address)));
  }
  fail(w, "%s of %u bytes at %p outside every bound buffer", what, bytes, (void *)address);
}

}  // namespace lily
