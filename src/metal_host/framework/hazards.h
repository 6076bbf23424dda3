// hazards=on: what every dispatch of a pass really touched, and whether dispatches that no barrier orders conflict.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace lily::metal {

struct Pass;

// A byte range of a buffer that one dispatch read or wrote.
struct Access {
  uint64_t start, end;  // addresses
  uint32_t dispatch;    // in its pass
  bool written;
};

// The recorder of one level: the engine reports into it.
class LevelAccesses {
 public:
  LevelAccesses(const Pass& pass, size_t first_dispatch) : pass_(pass), first_(first_dispatch) {}
  static void report(void* self, uint32_t dispatch, uint32_t store, uint64_t start, uint64_t end);
  void add(size_t dispatch, bool written, uint64_t start, uint64_t end);
  // The conflict between the earliest pair of dispatches, in words; empty when there is none.
  std::string conflict() const;
  // Puts the level into the process's log.
  void log() const;

 private:
  std::string describe(const Access& earlier, const Access& later) const;
  const Pass& pass_;
  size_t first_;
  std::vector<Access> accesses_;
};

// Dispatches are numbered on from pass to pass, until the log is read.
void log_pass_end(size_t dispatches);

}  // namespace lily::metal

// Calls `visit` for every range that passes have touched since the last call, in order of submission, and forgets them.
// Returns 0 when nothing is recorded because hazards is off. The oldest dispatches are gone when more than a million
// ranges have come together. Offsets are relative to the buffer's start.
extern "C" __attribute__((visibility("default"))) int lily_metal_recorded_accesses(
    void (*visit)(void* context, uint64_t dispatch, const char* kernel, const char* buffer, int written, uint64_t start, uint64_t end),
    void* context);
