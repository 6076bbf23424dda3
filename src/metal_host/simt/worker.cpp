// Memory of a worker: one region of address space, aligned to its size. Pages come into being on first use.
#include <new>
#include <string.h>
#include <sys/mman.h>

#include "worker.h"

namespace lily {

Worker *create_worker() {
  const size_t bytes = LILY_REGION_BYTES;
  void *reserved = mmap(nullptr, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  const uint64_t start = reinterpret_cast<uint64_t>(reserved), base = (start + bytes - 1) & ~(bytes - 1);
  if (base > start) munmap(reserved, base - start);
  munmap(reinterpret_cast<void *>(base + bytes), start + bytes - base);
  char *region = reinterpret_cast<char *>(base);
  // Everything is usable but the guard pages behind each threadgroup object and below the first stack.
  if (mprotect(region, kObjectsOffset + kObjectSlots * kObjectSlot, PROT_READ | PROT_WRITE)) return nullptr;
  for (uint32_t i = 0; i < kObjectSlots; i++)
    mprotect(region + kObjectsOffset + (i + 1) * kObjectSlot - kPage, kPage, PROT_NONE);
  mprotect(region + kObjectsOffset - kPage, kPage, PROT_NONE);

  Worker *w = new (region) Worker;
  memset(static_cast<void *>(w), 0, sizeof *w);
  static const char zeros[kPage] __attribute__((aligned(64))) = {0};
  w->zeros = reinterpret_cast<uint64_t>(zeros);
  for (uint32_t s = 0; s < LILY_MAX_THREADS / LILY_SIMD_WIDTH; s++) {
    Simdgroup *g = &w->simdgroups[s];
    g->index = s;
    g->header.in = reinterpret_cast<uint64_t>(&g->exchange[0]);
    g->header.out = reinterpret_cast<uint64_t>(&g->exchange[1]);
  }
  return w;
}

void destroy_worker(Worker *w) { munmap(w->base(), LILY_REGION_BYTES); }

}  // namespace lily
