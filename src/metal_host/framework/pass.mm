// Recorded passes: what they touch, and running them.
#include <cstring>

#include "commands.h"
#include "hazards.h"
#include "settings.h"
#include "support.h"

namespace lily::metal {

void* Arena::copy(const void* bytes, size_t length) {
  constexpr size_t kBlock = 16384;
  size_t rounded = (length + 15) & ~size_t(15);  // every value starts at the largest alignment of a Metal type
  if (used_ + rounded > capacity_) {
    blocks_.emplace_back(new unsigned char[kBlock]);
    used_ = 0;
    capacity_ = kBlock;
  }
  unsigned char* place = blocks_.back().get() + used_;
  used_ += rounded;
  memcpy(place, bytes, length);
  return place;
}

void Pass::note_touch(LilyBuffer* buffer, bool writes) {
  auto address = reinterpret_cast<uint64_t>(buffer->address);
  if (settings().hazards) buffers.emplace(address, BufferSpan{address + buffer->size, text_of([buffer label])});
  if ([buffer hazardTrackingMode] != MTLHazardTrackingModeTracked) return;
  bool& written = tracked[(__bridge const void*)buffer];
  written |= writes;
}

bool Pass::conflicts_with(const Pass& other) const {
  for (const auto& [buffer, writes] : tracked) {
    auto found = other.tracked.find(buffer);
    if (found != other.tracked.end() && (writes || found->second)) return true;
  }
  return false;
}

void Pass::end_level() {
  size_t end = dispatches.size();
  if (end > (level_ends.empty() ? 0 : level_ends.back())) level_ends.push_back(end);
}

std::string run_pass(Pass& pass) {
  for (const BlitOperation& blit : pass.blits) {
    if (blit.source) memmove(blit.destination, blit.source, blit.length);
    else memset(blit.destination, blit.value, blit.length);
  }
  LilyOptions options = settings().engine_options();
  size_t begin = 0, next_indirect = 0;
  std::string fault;
  for (size_t level = 0; level < pass.level_ends.size() && fault.empty(); level++) {
    size_t end = pass.level_ends[level];
    LevelAccesses accesses(pass, begin);
    for (; next_indirect < pass.indirect.size() && pass.indirect[next_indirect].first < end; next_indirect++) {
      LilyDispatch& dispatch = pass.dispatches[pass.indirect[next_indirect].first];
      memcpy(dispatch.groups, pass.indirect[next_indirect].second, sizeof dispatch.groups);
      auto counts = reinterpret_cast<uint64_t>(pass.indirect[next_indirect].second);
      if (settings().hazards) accesses.add(pass.indirect[next_indirect].first, false, counts, counts + sizeof dispatch.groups);
      for (int axis = 0; axis < 3; axis++) dispatch.grid[axis] = dispatch.groups[axis] * dispatch.threads[axis];
    }
    char error[1024] = "";
    options.seed = settings().seed + 7919 * level;  // another order in every level
    if (settings().hazards) {
      options.report = LevelAccesses::report;
      options.report_context = &accesses;
    }
    if (lily_simt_run(&pass.dispatches[begin], static_cast<uint32_t>(end - begin), &options, nullptr, error, sizeof error))
      fault = error[0] ? error : "a kernel failed";
    if (settings().hazards) {
      accesses.log();
      std::string conflict = accesses.conflict();  // what a kernel stumbles over may be the conflict's effect
      if (!conflict.empty()) fault = conflict;
    }
    begin = end;
  }
  if (settings().hazards) log_pass_end(pass.dispatches.size());
  return fault;
}

}  // namespace lily::metal
