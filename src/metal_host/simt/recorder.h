// Which bytes the dispatches of a run really read and wrote: exact, by one bit per byte and mode, in pages that come into
// being when they are touched (a quarter of the touched bytes per worker, until the run ends).
#pragma once
#include <stdint.h>

#include <map>
#include <memory>
#include <unordered_map>

#include "engine.h"

namespace lily {

// Belongs to one worker; the workers' recorders are merged when the run ends.
class AccessRecorder {
 public:
  void select(uint32_t dispatch);                  // what follows is noted for this dispatch of the run
  void note(uint64_t address, uint32_t bytes, uint32_t store);
  void merge(const AccessRecorder &other);
  void report(LilyAccessReport visit, void *context) const;

 private:
  static constexpr uint32_t kPageBytes = 4096, kWords = kPageBytes / 64, kCached = 64;
  struct Page { uint64_t touched[2][kWords] = {}; };                       // [0] read, [1] written
  using Pages = std::unordered_map<uint64_t, std::unique_ptr<Page>>;      // by address / kPageBytes
  struct Cached { uint64_t number; Page *page; };

  Page *page(uint64_t number);

  std::map<uint32_t, Pages> dispatches_;
  Pages *current_ = nullptr;
  Cached cached_[kCached] = {};
};

}  // namespace lily
