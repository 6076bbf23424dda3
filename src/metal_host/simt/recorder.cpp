#include "recorder.h"

#include <string.h>

#include <algorithm>
#include <vector>

namespace lily {
namespace {

// Joins ranges that touch each other before they are reported.
class Joiner {
 public:
  Joiner(LilyAccessReport visit, void *context, uint32_t dispatch, uint32_t store)
      : visit_(visit), context_(context), dispatch_(dispatch), store_(store) {}
  ~Joiner() { flush(); }
  void add(uint64_t start, uint64_t end) {
    if (start != end_) {
      flush();
      start_ = start;
    }
    end_ = end;
  }

 private:
  void flush() {
    if (end_ > start_) visit_(context_, dispatch_, store_, start_, end_);
  }
  LilyAccessReport visit_;
  void *context_;
  uint32_t dispatch_, store_;
  uint64_t start_ = 0, end_ = 0;
};

// Runs of set bits; `base` is the address of bit 0.
void add_runs(Joiner &ranges, uint64_t base, uint64_t bits) {
  for (uint32_t at = 0; bits;) {
    const uint32_t skip = uint32_t(__builtin_ctzll(bits));
    at += skip;
    bits >>= skip;
    const uint32_t run = ~bits ? uint32_t(__builtin_ctzll(~bits)) : 64;
    ranges.add(base + at, base + at + run);
    at += run;
    bits = run == 64 ? 0 : bits >> run;
  }
}

}  // namespace

void AccessRecorder::select(uint32_t dispatch) {
  current_ = &dispatches_[dispatch];
  memset(cached_, 0, sizeof cached_);
}

AccessRecorder::Page *AccessRecorder::page(uint64_t number) {
  Cached &cached = cached_[number % kCached];
  if (cached.page && cached.number == number) return cached.page;
  std::unique_ptr<Page> &owner = (*current_)[number];
  if (!owner) owner = std::make_unique<Page>();
  cached = Cached{number, owner.get()};
  return owner.get();
}

void AccessRecorder::note(uint64_t address, uint32_t bytes, uint32_t store) {
  while (bytes) {                                  // once for an aligned access: it stays inside one word
    const uint32_t bit = address % 64, count = std::min(bytes, 64 - bit);
    const uint64_t mask = (count == 64 ? ~0ull : (1ull << count) - 1) << bit;
    page(address / kPageBytes)->touched[store ? 1 : 0][address % kPageBytes / 64] |= mask;
    address += count;
    bytes -= count;
  }
}

void AccessRecorder::merge(const AccessRecorder &other) {
  for (const auto &[dispatch, pages] : other.dispatches_) {
    select(dispatch);
    for (const auto &[number, from] : pages) {
      Page *to = page(number);
      for (uint32_t store = 0; store < 2; store++)
        for (uint32_t word = 0; word < kWords; word++) to->touched[store][word] |= from->touched[store][word];
    }
  }
}

void AccessRecorder::report(LilyAccessReport visit, void *context) const {
  for (const auto &[dispatch, pages] : dispatches_) {
    std::vector<uint64_t> numbers;
    for (const auto &entry : pages) numbers.push_back(entry.first);
    std::sort(numbers.begin(), numbers.end());
    for (uint32_t store = 0; store < 2; store++) {
      Joiner ranges(visit, context, dispatch, store);
      for (uint64_t number : numbers)
        for (uint32_t word = 0; word < kWords; word++)
          add_runs(ranges, number * kPageBytes + word * 64, pages.at(number)->touched[store][word]);
    }
  }
}

}  // namespace lily
