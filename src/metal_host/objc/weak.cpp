// Weak references: one table from an object to the variables that point at it weakly.
// Everything happens under one lock; weak references are rare here (cycles between queue and command buffer).
#include "runtime.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

using namespace lily::objc;

namespace {

std::mutex weak_mutex;
std::unordered_map<id, std::vector<id*>>& table() {
  static auto* slots = new std::unordered_map<id, std::vector<id*>>;
  return *slots;
}

void forget(id* location) {
  if (!*location) return;
  auto entry = table().find(*location);
  if (entry == table().end()) return;
  auto& slots = entry->second;
  slots.erase(std::remove(slots.begin(), slots.end(), location), slots.end());
  if (slots.empty()) table().erase(entry);
}

// An object whose count has reached zero cannot be referred to weakly any more: the variable becomes nil.
void remember(id* location, id object) {
  *location = nullptr;
  if (!object) return;
  if (kind_of(object) == Kind::heap) {
    if (!try_retain(object)) return;
    auto* header = reinterpret_cast<Header*>(object) - 1;
    header->has_weak.store(1, std::memory_order_release);
    table()[object].push_back(location);
    // Cannot be the last reference: the caller holds the object while it assigns it.
    header->references.fetch_sub(1, std::memory_order_acq_rel);
  }
  *location = object;
}

}  // namespace

namespace lily::objc {

void clear_weak_references(id object) {
  std::lock_guard<std::mutex> lock(weak_mutex);
  auto entry = table().find(object);
  if (entry == table().end()) return;
  for (id* location : entry->second) *location = nullptr;
  table().erase(entry);
}

}  // namespace lily::objc

extern "C" {

id objc_initWeak(id* location, id object) {
  std::lock_guard<std::mutex> lock(weak_mutex);
  remember(location, object);
  return object;
}
id objc_storeWeak(id* location, id object) {
  std::lock_guard<std::mutex> lock(weak_mutex);
  forget(location);
  remember(location, object);
  return object;
}
void objc_destroyWeak(id* location) {
  std::lock_guard<std::mutex> lock(weak_mutex);
  forget(location);
  *location = nullptr;
}
id objc_loadWeakRetained(id* location) {
  std::lock_guard<std::mutex> lock(weak_mutex);
  id object = *location;
  return object && try_retain(object) ? object : nullptr;
}
id objc_loadWeak(id* location) { return objc_autorelease(objc_loadWeakRetained(location)); }
// The source may lose its last strong reference at any time, so it is held while the new variable is set up.
void objc_copyWeak(id* to, id* from) {
  id object = objc_loadWeakRetained(from);
  objc_initWeak(to, object);
  objc_release(object);
}
void objc_moveWeak(id* to, id* from) {
  objc_copyWeak(to, from);
  objc_destroyWeak(from);
}
}
