// One worker: an OS thread's region with lane stacks, simdgroups and threadgroup memory. It runs one
// threadgroup at a time, each of its threads as a fiber that is switched at rendezvous and barriers.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "engine.h"
#include "kernel_abi.h"

namespace lily {

class AccessRecorder;

constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 64 << 10;                 // build_kernels.py refuses frames over half of it
constexpr size_t kHeaderBytes = 256 << 10;               // struct Worker, at the base of the region
constexpr size_t kObjectSlot = (64 << 10) + kPage;       // a threadgroup object ends at the slot's guard page
constexpr uint32_t kObjectSlots = LILY_MAX_THREADGROUP_OBJECTS + LILY_MAX_BUFFERS;
constexpr size_t kStacksOffset = kHeaderBytes;
constexpr size_t kObjectsOffset = kStacksOffset + (LILY_MAX_THREADS + 1) * kStackBytes + kPage;
static_assert(kObjectsOffset + kObjectSlots * kObjectSlot < LILY_REGION_BYTES, "region too small");

struct alignas(64) Simdgroup {
  LilySimdgroupHeader header;          // what kernel code sees
  uint32_t runnable;                   // lanes that can go on (or start)
  uint32_t special;                    // lanes that the short path of rendezvous must not enter: they have no
                                       // stack yet, or lanes are not to run in order (all bits set)
  uint32_t live;                       // lanes that have not returned
  uint32_t unstarted;                  // lanes that have no stack yet
  uint32_t at_barrier;                 // all live lanes when they wait at a threadgroup_barrier, else 0
  uint32_t index;
  alignas(64) uint64_t stack[LILY_SIMD_WIDTH];   // saved stack pointers of suspended lanes
  alignas(64) uint32_t site[LILY_SIMD_WIDTH];    // where a lane waits: source line, kBarrierSite for a threadgroup_barrier
  alignas(64) LilyExchange exchange[2];
};
constexpr uint32_t kBarrierSite = LILY_BARRIER_SITE;

struct ThreadgroupObject { uint64_t address; uint64_t bytes; };

struct Worker : LilyWorkerHeader {
  uint64_t main_stack;                 // saved stack pointer of the worker itself
  LilyThread thread;                   // filled for each lane as it starts
  uint32_t last_started;               // index whose position `thread` holds
  uint32_t thread_count, simdgroup_count;
  uint32_t ready;                      // bit s: simdgroup s has runnable lanes
  uint32_t unfinished;                 // bit s: simdgroup s has live lanes
  uint32_t order, strict, poison;
  uint32_t threadgroup_limit, threadgroup_bytes;
  uint32_t stacks_used, free_stack_count;
  uint64_t random;
  LilyStats stats;
  const LilyDispatch *dispatch;
  const LilyKernelModule *module;
  const LilyKernelEntry *entry;
  AccessRecorder *recorder;            // NULL when nobody asks what dispatches touch
  uint32_t last_buffer;                // index of the binding that a strict module accessed last
  uint32_t failed;
  uint32_t object_count;
  ThreadgroupObject objects[kObjectSlots];
  uint64_t arguments[LILY_MAX_BUFFERS];           // threadgroup memory set by the host
  uint64_t running_stack;                         // base of the stack that the current lane runs on
  uint64_t free_stacks[LILY_MAX_THREADS];
  char message[512];
  Simdgroup simdgroups[LILY_MAX_THREADS / LILY_SIMD_WIDTH];

  char *base() { return reinterpret_cast<char *>(this); }
  uint32_t current_index() const { return simdgroup_index * LILY_SIMD_WIDTH + lane; }
};
static_assert(sizeof(Worker) <= kHeaderBytes, "worker does not fit its header");

// The worker whose region holds the stack we run on. Only valid inside a lane.
static inline __attribute__((always_inline)) Worker *worker_here() {
  uint64_t stack;
#if defined(__x86_64__)
  asm("movq %%rsp, %0" : "=r"(stack));
#else
  asm("mov %0, sp" : "=r"(stack));
#endif
  return reinterpret_cast<Worker *>(stack & ~(LILY_REGION_BYTES - 1));
}

Worker *create_worker();                                         // NULL when no memory
void destroy_worker(Worker *worker);
void begin_dispatch(Worker *worker, const LilyDispatch *dispatch);
bool run_threadgroup(Worker *worker, uint32_t x, uint32_t y, uint32_t z);    // false: see worker->message
[[noreturn]] void fail(Worker *worker, const char *format, ...) __attribute__((format(printf, 2, 3)));

// threadgroup_memory.cpp
uint64_t place_threadgroup_object(Worker *worker, uint64_t bytes, uint64_t align);
void place_threadgroup_arguments(Worker *worker);
void poison_threadgroup_memory(Worker *worker);

// checks.cpp
void install_fault_handler();
void register_region(Worker *worker);                // the fault handler knows lanes by their stack
void forget_region(Worker *worker);
void check_access(uint64_t address, uint32_t bytes, uint32_t kind);

// module.cpp
bool module_owns(const LilyModule *module, uint64_t address);    // code and constant data of the module

}  // namespace lily
