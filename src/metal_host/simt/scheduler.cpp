// The lanes of a threadgroup: starting, waiting at simd operations (rendezvous) and at barriers, finishing.
// The common case (lanes in order, all of a simdgroup at the same simd operation) is short straight code;
// everything else is in functions marked noinline.
#include <emmintrin.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "fiber.h"
#include "worker.h"

#define LILY_SLOW __attribute__((noinline))
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

namespace lily {
namespace {

uint32_t random_below(Worker *w, uint32_t n) {
  w->random ^= w->random << 13;
  w->random ^= w->random >> 7;
  w->random ^= w->random << 17;
  return uint32_t((w->random >> 32) * n >> 32);
}

LILY_SLOW uint32_t pick_unordered(Worker *w, uint32_t mask, uint32_t after) {
  if (w->order == LILY_ORDER_REVERSE) {
    const uint32_t below = mask & uint32_t((1ull << after) - 1);
    return 31 - __builtin_clz(below ? below : mask);
  }
  for (uint32_t skip = random_below(w, __builtin_popcount(mask)); skip; skip--) mask &= mask - 1;
  return __builtin_ctz(mask);
}

// The member of mask that goes on after member `after` has stopped.
inline __attribute__((always_inline)) uint32_t pick(Worker *w, uint32_t mask, uint32_t after) {
  if (unlikely(w->order != LILY_ORDER_FORWARD)) return pick_unordered(w, mask, after);
  const uint32_t above = mask & (~1u << after);
  return __builtin_ctz(above ? above : mask);
}

void lane_main();

// Fills worker->thread for the lane that starts now.
inline void set_thread(Worker *w, uint32_t index) {
  LilyThread &t = w->thread;
  t.index = index;
  if (t.size[1] == 1 && t.size[2] == 1) {
    t.position[0] = index;
  } else if (index == w->last_started + 1) {
    if (++t.position[0] == t.size[0]) {
      t.position[0] = 0;
      if (++t.position[1] == t.size[1]) { t.position[1] = 0; t.position[2]++; }
    }
  } else {
    t.position[0] = index % t.size[0];
    t.position[1] = index / t.size[0] % t.size[1];
    t.position[2] = index / t.size[0] / t.size[1];
  }
  w->last_started = index;
}

inline void mark_started(Worker *w, Simdgroup *g, uint32_t lane) {
  g->unstarted &= ~(1u << lane);
  if (w->order == LILY_ORDER_FORWARD) g->special = g->unstarted;
  set_thread(w, g->index * LILY_SIMD_WIDTH + lane);
}

// Gives the lane that is about to start a stack of its own: the one that it would otherwise run on is
// still in use by a lane that waits. Stack tops are staggered so that lanes do not share cache sets.
LILY_SLOW uint64_t new_stack(Worker *w) {
  uint64_t base;
  if (w->free_stack_count) base = w->free_stacks[--w->free_stack_count];
  else base = reinterpret_cast<uint64_t>(w->base()) + kStacksOffset + uint64_t(w->stacks_used++) * kStackBytes;
  w->running_stack = base;
  const uint64_t slot = (base >> 16) & 31;
  return fresh_stack(base + kStackBytes - slot * 576, lane_main);
}

// Makes `next` of the current simdgroup the running lane and returns its stack pointer.
inline uint64_t enter_lane(Worker *w, Simdgroup *g, uint32_t next) {
  w->lane = next;
  if (unlikely(g->unstarted >> next & 1)) {
    mark_started(w, g, next);
    return new_stack(w);
  }
  return g->stack[next];
}

inline void enter_simdgroup(Worker *w, Simdgroup *g) {
  w->simdgroup = reinterpret_cast<uint64_t>(&g->header);
  w->simdgroup_index = g->index;
}

inline Simdgroup *current(Worker *w) { return reinterpret_cast<Simdgroup *>(w->simdgroup); }

// Completes the simd operation of the lanes in `set`: what they wrote becomes readable.
inline void publish(Worker *w, Simdgroup *g, uint32_t set) {
  const uint64_t written = g->header.in;
  g->header.in = g->header.out;
  g->header.out = written;
  reinterpret_cast<LilyExchange *>(written)->mask = set;
  g->runnable = set;
  w->stats.simd_operations++;
}

// Lanes whose site is `site`, among all 32.
inline uint32_t lanes_at(const Simdgroup *g, uint32_t site) {
  uint32_t lanes = 0;
  const __m128i wanted = _mm_set1_epi32(int(site));
  for (int i = 0; i < LILY_SIMD_WIDTH; i += 4) {
    const __m128i sites = _mm_load_si128(reinterpret_cast<const __m128i *>(&g->site[i]));
    lanes |= uint32_t(_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(sites, wanted)))) << i;
  }
  return lanes;
}

// Live lanes wait in different places. Those at the first simd operation (by line) form a group of their
// own, as the active threads do on hardware; the rest waits on. Returns the group, 0 when all are at barriers.
LILY_SLOW uint32_t divergent_set(Worker *w, Simdgroup *g) {
  uint32_t first = kBarrierSite, set = 0;
  for (uint32_t m = g->live; m; m &= m - 1) {
    const uint32_t site = g->site[__builtin_ctz(m)];
    if (site < first) first = site;
  }
  if (first == kBarrierSite) return 0;
  set = lanes_at(g, first) & g->live;
  w->stats.divergent++;
  if (w->strict >= LILY_STRICT_SIMD)
    fail(w, "simd operation at line %u is reached by lanes %08x only, lanes %08x wait elsewhere", first, set, g->live & ~set);
  return set;
}

// Lanes of g that wait and are not in `set` keep their values for the operation they wait at.
LILY_SLOW void keep_values(Simdgroup *g, uint32_t set) {
  const LilyExchange *from = reinterpret_cast<LilyExchange *>(g->header.out);
  LilyExchange *to = reinterpret_cast<LilyExchange *>(g->header.in);
  for (uint32_t m = g->live & ~set; m; m &= m - 1)
    for (uint32_t word = 0, l = __builtin_ctz(m); word < 4; word++) to->words[word][l] = from->words[word][l];
}

LILY_SLOW void release_barrier(Worker *w) {
  bool all_wait = true, same = true;
  const uint32_t site = w->simdgroups[__builtin_ctz(w->unfinished)].site[__builtin_ctz(w->simdgroups[__builtin_ctz(w->unfinished)].live)];
  w->ready = w->unfinished;
  for (uint32_t s = 0; s < w->simdgroup_count; s++) {
    Simdgroup *g = &w->simdgroups[s];
    const uint32_t left = w->thread_count - s * LILY_SIMD_WIDTH, full = left >= LILY_SIMD_WIDTH ? ~0u : (1u << left) - 1;
    all_wait &= g->at_barrier == full;
    same &= (g->at_barrier & ~lanes_at(g, site)) == 0;
    g->runnable = g->at_barrier;
    g->at_barrier = 0;
  }
  w->stats.barriers++;
  if (w->strict < LILY_STRICT_BARRIERS) return;
  const uint32_t line = site & ~kBarrierSite;
  if (!all_wait) fail(w, "threadgroup_barrier at line %u is not reached by every thread of the threadgroup: some have returned", line);
  if (!same) fail(w, "threads of one threadgroup wait at different threadgroup_barriers, one of them at line %u", line);
}

// No lane of the current simdgroup can go on. Enters the next simdgroup and returns the stack pointer to
// continue at; 0 when the whole threadgroup has finished.
uint64_t next_simdgroup(Worker *w) {
  w->ready &= ~(1u << w->simdgroup_index);
  uint32_t after = w->simdgroup_index;
  if (!w->ready) {
    if (!w->unfinished) return 0;
    release_barrier(w);
    after = w->order == LILY_ORDER_REVERSE ? 0 : 31;
  }
  Simdgroup *g = &w->simdgroups[pick(w, w->ready, after)];
  enter_simdgroup(w, g);
  return enter_lane(w, g, pick(w, g->runnable, w->order == LILY_ORDER_REVERSE ? 0 : 31));
}

// Every live lane of the current simdgroup waits, or none is left.
inline Next all_wait(Worker *w, Simdgroup *g, uint32_t lane) {
  uint32_t set = 0;
  if (likely(g->live)) {
    const uint32_t site = g->site[__builtin_ctz(g->live)];
    if (likely((g->live & ~lanes_at(g, site)) == 0)) {
      set = site & kBarrierSite ? 0 : g->live;
      // A barrier in a threadgroup of one full simdgroup needs nobody else.
      if (!set && w->thread_count == LILY_SIMD_WIDTH && g->live == ~0u) {
        g->runnable = ~0u;
        w->stats.barriers++;
        return Next{0, 0};
      }
    }
    else set = divergent_set(w, g);
    if (set) {
      publish(w, g, set);
      if (unlikely(set != g->live)) keep_values(g, set);
      // The lane that stopped last goes on at once when it takes part.
      if (likely(set >> lane & 1)) return Next{0, 1};
      return Next{enter_lane(w, g, __builtin_ctz(set)), 1};
    }
    g->at_barrier = g->live;
  }
  return Next{next_simdgroup(w), 0};
}

[[noreturn]] LILY_SLOW void leave(Worker *w) { lily_leave(w->main_stack, 0); }

// Runs lanes on one stack: a lane that returns without ever having waited leaves it to the next one.
void lane_main() {
  Worker *w = worker_here();
  const uint64_t base = w->running_stack;
  for (;;) {
    w->entry->function(&w->thread);
    Simdgroup *g = current(w);
    const uint32_t lane = w->lane, bit = 1u << lane;
    g->live &= ~bit;
    g->runnable &= ~bit;
    if (!g->live) w->unfinished &= ~(1u << g->index);
    if (g->runnable) {
      const uint32_t next = pick(w, g->runnable, lane);
      if (g->unstarted >> next & 1) {
        w->lane = next;
        mark_started(w, g, next);
        continue;
      }
      w->free_stacks[w->free_stack_count++] = base;
      w->lane = next;
      lily_leave(g->stack[next], 0);
    }
    w->free_stacks[w->free_stack_count++] = base;      // nothing else runs on it before we have left it
    const Next next = all_wait(w, g, lane);
    lily_leave(next.stack ? next.stack : w->main_stack, next.value);
  }
}

}  // namespace

extern "C" Next lily_after_stop(Worker *w) {
  Simdgroup *g = current(w);
  const uint32_t lane = w->lane;
  if (g->runnable) return Next{enter_lane(w, g, pick(w, g->runnable, lane)), 0};
  return all_wait(w, g, lane);
}

void fail(Worker *w, const char *format, ...) {
  if (!w->failed) {
    w->failed = 1;
    const uint32_t *group = w->thread.group;
    int used = snprintf(w->message, sizeof w->message, "kernel %s (%s:%u): ", w->entry->name, w->module->source, w->entry->line);
    va_list arguments;
    va_start(arguments, format);
    used += vsnprintf(w->message + used, sizeof w->message - used, format, arguments);
    va_end(arguments);
    if (used < int(sizeof w->message))
      snprintf(w->message + used, sizeof w->message - used, " [threadgroup %u,%u,%u, thread %u]", group[0], group[1], group[2], w->current_index());
  }
  leave(w);
}

void begin_dispatch(Worker *w, const LilyDispatch *d) {
  w->dispatch = d;
  w->module = lily_simt_describe(d->module);
  w->entry = &w->module->entries[d->entry];
  w->constants = reinterpret_cast<uint64_t>(d->constants);
  LilyThread &t = w->thread;
  t.buffers = reinterpret_cast<uint64_t>(d->buffers);
  t.threadgroup_arguments = reinterpret_cast<uint64_t>(w->arguments);
  for (int k = 0; k < 3; k++) {
    t.nominal[k] = d->threads[k];
    t.grid[k] = d->grid[k];
    t.groups[k] = d->groups[k];
  }
  w->object_count = w->threadgroup_bytes = 0;
  memset(w->threadgroup_object, 0, sizeof w->threadgroup_object);
  place_threadgroup_arguments(w);
}

bool run_threadgroup(Worker *w, uint32_t x, uint32_t y, uint32_t z) {
  LilyThread &t = w->thread;
  const uint32_t group[3] = {x, y, z};
  for (int k = 0; k < 3; k++) {
    const uint32_t left = t.grid[k] - group[k] * t.nominal[k];
    t.group[k] = group[k];
    t.size[k] = left < t.nominal[k] ? left : t.nominal[k];
    t.position[k] = 0;
  }
  const uint32_t count = t.size[0] * t.size[1] * t.size[2], simdgroups = (count + 31) / 32;
  w->thread_count = count;
  w->simdgroup_count = t.simdgroups = simdgroups;
  w->ready = w->unfinished = simdgroups >= 32 ? ~0u : (1u << simdgroups) - 1;
  for (uint32_t s = 0; s < simdgroups; s++) {
    Simdgroup *g = &w->simdgroups[s];
    const uint32_t lanes = count - s * 32 >= 32 ? ~0u : (1u << (count - s * 32)) - 1;
    g->runnable = g->live = g->unstarted = lanes;
    g->special = ~0u;
    g->at_barrier = 0;
  }
  if (w->poison && w->object_count) poison_threadgroup_memory(w);
  w->stacks_used = w->free_stack_count = 0;
  w->last_started = ~0u - 1;
  w->stats.threadgroups++;
  w->stats.threads += count;
  const uint32_t before_first = w->order == LILY_ORDER_REVERSE ? 0 : 31;
  Simdgroup *first = &w->simdgroups[pick(w, w->ready, before_first)];
  enter_simdgroup(w, first);
  lily_enter(&w->main_stack, enter_lane(w, first, pick(w, first->runnable, before_first)));
  return !w->failed;
}

}  // namespace lily
