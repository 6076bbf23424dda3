// The worker pool: dispatches of one call are one job, whose threadgroups the caller and the helpers take
// in chunks from an atomic counter. Helpers spin briefly after a job, since a decode step is hundreds of
// short dispatches, and then sleep on a futex.
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "recorder.h"
#include "worker.h"

namespace lily {
namespace {

constexpr int64_t kSpinNanoseconds = 40'000;     // how long an idle helper keeps looking for work
constexpr uint64_t kOpen = 1ull << 31;           // gate: helpers may join; low bits: helpers inside; high half: job number
constexpr uint64_t kInside = kOpen - 1;

struct Job {
  const LilyDispatch *dispatches;
  uint32_t count;
  LilyOptions options;
  std::vector<uint64_t> ends;                    // running sum of threadgroups
  uint64_t total, chunk, stride, offset;         // stride and offset permute threadgroups in random order
  std::atomic<uint64_t> next{0};
  std::atomic<int> failed{0};
  uint32_t helpers;
  std::mutex result_mutex;
  LilyStats stats;
  AccessRecorder accesses;                       // of all workers that are done
  char message[512];
};

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t> *word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t> *word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

uint64_t greatest_common_divisor(uint64_t a, uint64_t b) { return b ? greatest_common_divisor(b, a % b) : a; }

void add(LilyStats &to, const LilyStats &from) {
  to.threadgroups += from.threadgroups;
  to.threads += from.threads;
  to.simd_operations += from.simd_operations;
  to.barriers += from.barriers;
  to.divergent += from.divergent;
  if (from.threadgroup_peak > to.threadgroup_peak) to.threadgroup_peak = from.threadgroup_peak;
}

// Takes threadgroups of the job until none is left or one has failed.
void work(Worker *w, Job &job, uint32_t who) {
  const LilyOptions &o = job.options;
  w->order = o.order;
  w->strict = o.strict;
  w->poison = o.poison;
  w->threadgroup_limit = o.threadgroup_limit;
  w->random = (o.seed * 0x9E3779B97F4A7C15ull + who * 0xD1B54A32D192ED03ull) | 1;
  w->stats = LilyStats{};
  w->failed = 0;
  w->dispatch = nullptr;
  std::unique_ptr<AccessRecorder> recorder(o.report ? new AccessRecorder : nullptr);
  w->recorder = recorder.get();
  while (!job.failed.load(std::memory_order_relaxed)) {
    const uint64_t first = job.next.fetch_add(job.chunk, std::memory_order_relaxed);
    if (first >= job.total) break;
    const uint64_t last = first + job.chunk < job.total ? first + job.chunk : job.total;
    for (uint64_t i = first; i < last; i++) {
      uint64_t group = i;
      if (o.order == LILY_ORDER_REVERSE) group = job.total - 1 - i;
      if (o.order == LILY_ORDER_RANDOM) group = uint64_t((static_cast<unsigned __int128>(i) * job.stride + job.offset) % job.total);
      uint32_t which = 0;
      while (group >= job.ends[which]) which++;
      const LilyDispatch *d = &job.dispatches[which];
      if (which) group -= job.ends[which - 1];
      if (w->dispatch != d) {
        begin_dispatch(w, d);
        if (recorder) recorder->select(which);
      }
      const uint64_t row = group / d->groups[0];
      if (run_threadgroup(w, uint32_t(group % d->groups[0]), uint32_t(row % d->groups[1]), uint32_t(row / d->groups[1]))) continue;
      std::lock_guard<std::mutex> lock(job.result_mutex);
      if (!job.failed.exchange(1)) memcpy(job.message, w->message, sizeof job.message);
      break;
    }
  }
  std::lock_guard<std::mutex> lock(job.result_mutex);
  add(job.stats, w->stats);
  if (recorder) job.accesses.merge(*recorder);
  w->recorder = nullptr;
}

class Pool {
 public:
  int run(Job &job) {
    std::lock_guard<std::mutex> lock(run_mutex_);
    if (owner_ != getpid()) abandon_after_fork();
    if (!caller_) {
      caller_ = create_worker();
      if (!caller_) { snprintf(job.message, sizeof job.message, "no memory for a worker"); return 1; }
      register_region(caller_);
    }
    const uint64_t useful = (job.total + job.chunk - 1) / job.chunk;
    uint32_t helpers = job.options.workers - 1;
    if (useful <= helpers) helpers = uint32_t(useful ? useful - 1 : 0);
    while (threads_.size() < helpers) start_helper();
    job.helpers = helpers;
    if (helpers) open(job);
    work(caller_, job, 0);
    if (helpers) close();
    return job.failed.load();
  }

  void shutdown() {
    std::lock_guard<std::mutex> lock(run_mutex_);
    if (owner_ != getpid()) return;
    stop_.store(true);
    wake_.fetch_add(1);
    futex_wake(&wake_, 1 << 30);
    for (auto &t : threads_) t.join();
    threads_.clear();
    stop_.store(false);
  }

 private:
  void open(Job &job) {
    job_ = &job;
    gate_.store((++number_ << 32) | kOpen, std::memory_order_seq_cst);
    wake_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t asleep = sleepers_.load(std::memory_order_seq_cst);
    if (asleep) futex_wake(&wake_, int(job.helpers));
  }

  // No helper may join any more; waits for those inside.
  void close() {
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire) & kInside; spins++) {
      if (spins < 4000) { pause_cpu(); continue; }
      caller_waits_.store(1, std::memory_order_seq_cst);
      if (gate_.load(std::memory_order_seq_cst) & kInside) futex_wait(&caller_waits_, 1);
      caller_waits_.store(0, std::memory_order_relaxed);
    }
  }

  void start_helper() {
    const uint32_t index = uint32_t(threads_.size());
    threads_.emplace_back([this, index] { helper(index); });
  }

  void helper(uint32_t index) {
    Worker *w = create_worker();
    if (!w) return;
    register_region(w);
    uint64_t done = 0;
    int64_t idle_since = now();
    while (!stop_.load(std::memory_order_relaxed)) {
      const uint32_t ticket = wake_.load(std::memory_order_acquire);
      uint64_t gate = gate_.load(std::memory_order_acquire);
      if ((gate & kOpen) && (gate >> 32) != done) {
        if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
        done = gate >> 32;
        if (index < job_->helpers) work(w, *job_, index + 1);
        gate_.fetch_sub(1, std::memory_order_seq_cst);
        if (caller_waits_.load(std::memory_order_seq_cst)) {
          caller_waits_.store(0);
          futex_wake(&caller_waits_, 1);
        }
        idle_since = now();
        continue;
      }
      bool idle = true;
      for (int i = 0; i < 64 && idle; i++) {
        pause_cpu();
        idle = wake_.load(std::memory_order_relaxed) == ticket;
      }
      if (!idle || now() - idle_since < kSpinNanoseconds) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      futex_wait(&wake_, ticket);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      idle_since = now();
    }
    forget_region(w);
    destroy_worker(w);
  }

  // In a forked child the helpers do not exist: forget them (their memory is the parent's copy).
  void abandon_after_fork() {
    for (auto &t : threads_) t.detach();
    threads_.clear();
    gate_.store(0);
    sleepers_.store(0);
    owner_ = getpid();
  }

  std::mutex run_mutex_;
  std::vector<std::thread> threads_;
  Worker *caller_ = nullptr;
  pid_t owner_ = getpid();
  Job *job_ = nullptr;
  uint64_t number_ = 0;
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> caller_waits_{0};
  std::atomic<bool> stop_{false};
};

Pool &pool() {
  static Pool *one = new Pool;                   // never destroyed: helpers may outlive static destructors
  return *one;
}

// Refuses what would run out of the engine's tables; the host checks what Metal's validation checks.
bool valid(const LilyDispatch &d, uint32_t limit, char *error, size_t size) {
  const LilyKernelModule *m = lily_simt_describe(d.module);
  if (d.entry >= m->entry_count) { snprintf(error, size, "no kernel number %u", d.entry); return false; }
  const uint64_t threads = uint64_t(d.threads[0]) * d.threads[1] * d.threads[2];
  if (!threads || threads > LILY_MAX_THREADS) {
    snprintf(error, size, "kernel %s: %llu threads per threadgroup (1 to %d are possible)", m->entries[d.entry].name, (unsigned long long)threads, LILY_MAX_THREADS);
    return false;
  }
  for (int k = 0; k < 3; k++)
    if (d.groups[k] && (uint64_t(d.groups[k] - 1) * d.threads[k] >= d.grid[k])) {
      snprintf(error, size, "kernel %s: a grid of %u threads does not need %u threadgroups of %u", m->entries[d.entry].name, d.grid[k], d.groups[k], d.threads[k]);
      return false;
    }
  uint64_t bytes = lily_simt_static_threadgroup_bytes(d.module, d.entry);
  for (uint32_t b : d.threadgroup_bytes) bytes += (b + 15) & ~15u;
  if (bytes > limit) {
    snprintf(error, size, "kernel %s: threadgroup memory of %llu bytes exceeds the limit of %u", m->entries[d.entry].name, (unsigned long long)bytes, limit);
    return false;
  }
  if (m->constant_count && !d.constants) { snprintf(error, size, "kernel %s: no function constants", m->entries[d.entry].name); return false; }
  return true;
}

}  // namespace
}  // namespace lily

int lily_simt_run(const LilyDispatch *dispatches, uint32_t count, const LilyOptions *options, LilyStats *stats, char *error, size_t error_size) {
  lily::install_fault_handler();
  lily::Job job;
  job.dispatches = dispatches;
  job.count = count;
  job.options = options ? *options : LilyOptions{0, LILY_ORDER_FORWARD, LILY_STRICT_BARRIERS, 1, 0, 0, 0, nullptr, nullptr};
  if (!job.options.workers) job.options.workers = lily_simt_cores();
  if (!job.options.threadgroup_limit) job.options.threadgroup_limit = LILY_THREADGROUP_LIMIT;
  job.stats = LilyStats{};
  job.message[0] = 0;
  job.total = 0;
  for (uint32_t i = 0; i < count; i++) {
    if (!lily::valid(dispatches[i], job.options.threadgroup_limit, error, error_size)) return 1;
    job.total += uint64_t(dispatches[i].groups[0]) * dispatches[i].groups[1] * dispatches[i].groups[2];
    job.ends.push_back(job.total);
  }
  job.chunk = job.total / (uint64_t(job.options.workers) * 8);
  if (!job.chunk) job.chunk = 1;
  job.stride = 1;
  job.offset = 0;
  if (job.options.order == LILY_ORDER_RANDOM && job.total > 1) {
    uint64_t mixed = (job.options.seed + 1) * 0x9E3779B97F4A7C15ull;
    job.offset = (mixed >> 20) % job.total;
    job.stride = (mixed >> 7) % job.total | 1;
    while (lily::greatest_common_divisor(job.stride, job.total) != 1) job.stride++;
  }
  const int failed = job.total ? lily::pool().run(job) : 0;
  if (failed && error && error_size) snprintf(error, error_size, "%s", job.message);
  if (stats) *stats = job.stats;
  if (job.options.report) job.accesses.report(job.options.report, job.options.report_context);
  return failed;
}

uint32_t lily_simt_cores(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    const int n = CPU_COUNT(&set);
    if (n > 0) return uint32_t(n);
  }
  const long n = sysconf(_SC_NPROCESSORS_ONLN);
  return n > 0 ? uint32_t(n) : 1;
}

void lily_simt_shutdown(void) { lily::pool().shutdown(); }
