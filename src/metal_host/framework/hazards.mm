#include "hazards.h"

#include <algorithm>
#include <deque>
#include <mutex>

#include "commands.h"
#include "settings.h"

namespace lily::metal {
namespace {

constexpr size_t kMaxLogged = size_t(1) << 20;  // ranges; a test suite that never reads the log must not grow

struct Logged {
  uint64_t dispatch, start, end;  // bytes from the buffer's start
  std::string kernel, buffer;
  bool written;
};

struct Log {
  std::mutex mutex;
  std::deque<Logged> ranges;
  uint64_t next_dispatch = 0;  // number of the running pass's first dispatch
};
Log& access_log() {
  static Log* log = new Log;  // a queue's thread may outlive static destructors
  return *log;
}

const char* kernel_name(const LilyDispatch& dispatch) { return lily_simt_describe(dispatch.module)->entries[dispatch.entry].name; }

}  // namespace

void LevelAccesses::report(void* self, uint32_t dispatch, uint32_t store, uint64_t start, uint64_t end) {
  auto* level = static_cast<LevelAccesses*>(self);
  level->add(level->first_ + dispatch, store != 0, start, end);
}

// Bytes of setBytes lie in no buffer and belong to one dispatch; a range may span buffers that lie side by side.
void LevelAccesses::add(size_t dispatch, bool written, uint64_t start, uint64_t end) {
  auto buffer = pass_.buffers.upper_bound(start);
  if (buffer != pass_.buffers.begin()) --buffer;
  for (; buffer != pass_.buffers.end() && buffer->first < end; ++buffer) {
    uint64_t from = std::max(start, buffer->first), to = std::min(end, buffer->second.end);
    if (from < to) accesses_.push_back({from, to, static_cast<uint32_t>(dispatch), written});
  }
}

std::string LevelAccesses::conflict() const {
  std::vector<Access> sorted = accesses_;
  std::sort(sorted.begin(), sorted.end(), [](const Access& a, const Access& b) { return a.start < b.start; });
  std::vector<const Access*> open;  // ranges that have started and not ended: at most two of a dispatch
  const Access *earlier = nullptr, *later = nullptr;
  auto in_order = [](const Access& a, const Access& b) { return std::make_pair(std::min(a.dispatch, b.dispatch), std::max(a.dispatch, b.dispatch)); };
  for (const Access& access : sorted) {
    open.erase(std::remove_if(open.begin(), open.end(), [&](const Access* o) { return o->end <= access.start; }), open.end());
    for (const Access* other : open) {
      if (other->dispatch == access.dispatch || !(other->written || access.written)) continue;
      if (earlier && in_order(*other, access) >= in_order(*earlier, *later)) continue;
      bool swap = other->dispatch > access.dispatch;
      earlier = swap ? &access : other;
      later = swap ? other : &access;
    }
    open.push_back(&access);
  }
  return earlier ? describe(*earlier, *later) : "";
}

std::string LevelAccesses::describe(const Access& earlier, const Access& later) const {
  uint64_t start = std::max(earlier.start, later.start), end = std::min(earlier.end, later.end);
  auto buffer = std::prev(pass_.buffers.upper_bound(start));
  auto act = [&](const Access& a) {
    return std::string(kernel_name(pass_.dispatches[a.dispatch])) + " (dispatch " + std::to_string(a.dispatch) + ")" + (a.written ? " writes" : " reads");
  };
  const char* kind = earlier.written ? (later.written ? "write after write" : "read after write") : "write after read";
  return "hazard: " + act(earlier) + " and " + act(later) + " bytes " + std::to_string(start - buffer->first) + " to " +
         std::to_string(end - buffer->first) + " of buffer '" + buffer->second.label + "' (" + kind + "), and no barrier of the pass stands between them";
}

void LevelAccesses::log() const {
  Log& log = access_log();
  std::lock_guard<std::mutex> lock(log.mutex);
  for (const Access& access : accesses_) {
    auto buffer = std::prev(pass_.buffers.upper_bound(access.start));
    log.ranges.push_back({log.next_dispatch + access.dispatch, access.start - buffer->first, access.end - buffer->first,
                          kernel_name(pass_.dispatches[access.dispatch]), buffer->second.label, access.written});
  }
  while (log.ranges.size() > kMaxLogged) log.ranges.pop_front();
}

void log_pass_end(size_t dispatches) {
  Log& log = access_log();
  std::lock_guard<std::mutex> lock(log.mutex);
  log.next_dispatch += dispatches;
}

}  // namespace lily::metal

int lily_metal_recorded_accesses(void (*visit)(void*, uint64_t, const char*, const char*, int, uint64_t, uint64_t), void* context) {
  using namespace lily::metal;
  if (!settings().hazards) return 0;
  std::deque<Logged> ranges;
  {
    Log& log = access_log();
    std::lock_guard<std::mutex> lock(log.mutex);
    ranges.swap(log.ranges);
    log.next_dispatch = 0;
  }
  for (const Logged& r : ranges) visit(context, r.dispatch, r.kernel.c_str(), r.buffer.c_str(), r.written, r.start, r.end);
  return 1;
}
