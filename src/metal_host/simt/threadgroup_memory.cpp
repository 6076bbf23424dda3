// Threadgroup memory: each variable or host-sized argument lies in a slot of its own and ends at a guard
// page, so that an overrun faults at once. Objects keep their place for a whole dispatch.
#include <string.h>

#include "worker.h"

namespace lily {

uint64_t place_threadgroup_object(Worker *w, uint64_t bytes, uint64_t align) {
  if (align < 16) align = 16;
  w->threadgroup_bytes += uint32_t((bytes + 15) & ~15ull);
  if (w->threadgroup_bytes > w->stats.threadgroup_peak) w->stats.threadgroup_peak = w->threadgroup_bytes;
  if (w->threadgroup_bytes > w->threadgroup_limit)
    fail(w, "threadgroup memory of %u bytes exceeds the limit of %u", w->threadgroup_bytes, w->threadgroup_limit);
  if (w->object_count == kObjectSlots || bytes > kObjectSlot - kPage) fail(w, "too much threadgroup memory");
  const uint64_t slot = reinterpret_cast<uint64_t>(w->base()) + kObjectsOffset + uint64_t(w->object_count) * kObjectSlot;
  const uint64_t end = slot + kObjectSlot - kPage;
  const uint64_t address = (end - bytes) & ~(align - 1);
  w->objects[w->object_count++] = ThreadgroupObject{address, end - address};
  if (w->poison) memset(reinterpret_cast<void *>(address), 0xff, end - address);
  return address;
}

void place_threadgroup_arguments(Worker *w) {
  for (int i = 0; i < LILY_MAX_BUFFERS; i++) {
    const uint32_t bytes = w->dispatch->threadgroup_bytes[i];
    w->arguments[i] = bytes ? place_threadgroup_object(w, bytes, 16) : 0;
  }
}

// All bits set: NaN as float, half and bfloat, and an index that no array has.
void poison_threadgroup_memory(Worker *w) {
  for (uint32_t i = 0; i < w->object_count; i++)
    memset(reinterpret_cast<void *>(w->objects[i].address), 0xff, w->objects[i].bytes);
}

}  // namespace lily
