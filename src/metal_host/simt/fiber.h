// Lanes as fibers. A suspended lane is a stack pointer, with the frame pointer and the address to return to
// on top of its stack; every other register is saved by kernel code itself, which calls the engine with the
// preserve_none convention. Kernels are built with -mno-red-zone.
#pragma once
#include <stdint.h>

#include "worker.h"

namespace lily {

// What runs next after a lane has stopped: a stack pointer (0: the lane itself goes on) and the value that
// the lane there gets from its simd operation (1: it is the leader).
struct Next { uint64_t stack, value; };

// Kernel code calls this at every simd operation and barrier: marks the lane as stopped and switches to the
// next one. Site is the source line, with kBarrierSite for threadgroup_barrier.
LILY_LANE_CALL uint32_t rendezvous(uint32_t site);

// The slow half of rendezvous: no lane of the simdgroup is runnable, or the next one needs preparation.
extern "C" Next lily_after_stop(Worker *worker);

// Saves the worker's own state in *save and runs lanes until one leaves.
extern "C" void lily_enter(uint64_t *save, uint64_t stack);
// Continues at `stack`; nothing of the current stack is needed any more.
extern "C" [[noreturn]] void lily_leave(uint64_t stack, uint64_t value);

// A stack that enters `entry` (which never returns) when it is switched to.
static inline uint64_t fresh_stack(uint64_t top, void (*entry)()) {
  uint64_t *stack = reinterpret_cast<uint64_t *>(top & ~15ull);
  *--stack = 0;                                    // entry sees rsp % 16 == 8, as after a call
  *--stack = reinterpret_cast<uint64_t>(entry);
  *--stack = 0;                                    // rbp
  return reinterpret_cast<uint64_t>(stack);
}

}  // namespace lily
