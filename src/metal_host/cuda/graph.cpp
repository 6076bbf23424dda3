#include "graph.h"

#include <cstring>
#include <unordered_set>

namespace lily::cuda {
namespace {

constexpr size_t kMaxEntries = 512;   // graphs kept: a prompt's chunk is a dozen, and a process may take turns with several kinds of pass
constexpr size_t kMaxSameShape = 48;  // beyond so many of one shape, the oldest is given new contents instead
constexpr size_t kMaxFanOut = 16;     // edges between two levels; more go through an empty node

uint64_t shape_of(const Work& work) {
  uint64_t hash = 0xcbf29ce484222325;
  auto mix = [&](uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15, hash ^= hash >> 29; };
  for (size_t end : work.level_ends) mix(end);
  for (const Node& node : work.nodes) {
    mix(reinterpret_cast<uint64_t>(node.function));
    mix(node.shared_bytes);
    for (unsigned n : node.block) mix(n);
  }
  return hash;
}

// By words, which the compiler turns into vector code: a decode step compares 200 KB.
bool same(const Node& a, const Node& b) {
  static_assert(sizeof(Node) % 8 == 0);
  auto *x = reinterpret_cast<const uint64_t*>(&a), *y = reinterpret_cast<const uint64_t*>(&b);
  uint64_t different = 0;
  for (size_t i = 0; i < sizeof(Node) / 8; i++) different |= x[i] ^ y[i];
  return different == 0;
}
bool same_shape(const Work& a, const Work& b) {
  if (a.nodes.size() != b.nodes.size() || a.level_ends != b.level_ends) return false;
  for (size_t i = 0; i < a.nodes.size(); i++)
    if (a.nodes[i].function != b.nodes[i].function || a.nodes[i].shared_bytes != b.nodes[i].shared_bytes ||
        memcmp(a.nodes[i].block, b.nodes[i].block, sizeof a.nodes[i].block) != 0)
      return false;
  return true;
}
bool same_contents(const Work& a, const Work& b) {
  if (a.nodes.size() != b.nodes.size() || a.level_ends != b.level_ends) return false;
  for (size_t i = 0; i < a.nodes.size(); i++)
    if (!same(a.nodes[i], b.nodes[i])) return false;
  return true;
}

KernelNodeParams parameters(const Node& node, void** arguments) {
  KernelNodeParams p = {};
  p.function = node.function;
  memcpy(p.grid, node.grid, sizeof p.grid);
  memcpy(p.block, node.block, sizeof p.block);
  p.shared_bytes = node.shared_bytes;
  arguments[0] = const_cast<Launch*>(&node.launch);
  p.parameters = arguments;
  return p;
}

}  // namespace

void GraphCache::destroy(Entry& entry) {
  const Driver& d = driver();
  if (entry.exec) d.cuGraphExecDestroy(entry.exec);
  if (entry.graph) d.cuGraphDestroy(entry.graph);
}

void GraphCache::clear() {
  for (Entry& entry : entries_) destroy(entry);
  entries_.clear();
}

CUresult GraphCache::build(const Work& work, Entry& entry) {
  const Driver& d = driver();
  if (CUresult code = d.cuGraphCreate(&entry.graph, 0)) return code;
  std::vector<CUgraphNode> before, level;  // what this level waits for, and its own nodes
  size_t begin = 0;
  std::unordered_set<metal::Kernel*> seen;
  for (size_t end : work.level_ends) {
    if (before.size() * (end - begin) > kMaxFanOut && before.size() > 1 && end - begin > 1) {
      CUgraphNode join = nullptr;
      if (CUresult code = d.cuGraphAddEmptyNode(&join, entry.graph, before.data(), before.size())) return code;
      before = {join};
    }
    level.clear();
    for (size_t i = begin; i < end; i++) {
      void* arguments[1];
      KernelNodeParams p = parameters(work.nodes[i], arguments);
      CUgraphNode node = nullptr;
      if (CUresult code = d.cuGraphAddKernelNode_v2(&node, entry.graph, before.data(), before.size(), &p)) return code;
      level.push_back(node);
      entry.handles.push_back(node);
      if (seen.insert(work.nodes[i].kernel).second) entry.kernels.push_back(work.nodes[i].kernel->shared_from_this());
    }
    before = level;
    begin = end;
  }
  return d.cuGraphInstantiateWithFlags(&entry.exec, entry.graph, 0);
}

// Launches that are on their way keep what they were launched with.
CUresult GraphCache::update(const Work& work, Entry& entry) {
  for (size_t i = 0; i < work.nodes.size(); i++) {
    if (same(work.nodes[i], entry.work.nodes[i])) continue;
    void* arguments[1];
    KernelNodeParams p = parameters(work.nodes[i], arguments);
    if (CUresult code = driver().cuGraphExecKernelNodeSetParams_v2(entry.exec, entry.handles[i], &p)) return code;
    entry.work.nodes[i] = work.nodes[i];
  }
  return kSuccess;
}

CUresult GraphCache::launch(const Work& work, CUstream stream) {
  const Driver& d = driver();
  uint64_t shape = shape_of(work);
  auto oldest = entries_.end();
  size_t alike = 0;
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (entry->shape != shape || !same_shape(entry->work, work)) continue;
    if (same_contents(entry->work, work)) {
      entries_.splice(entries_.begin(), entries_, entry);
      return context_.note(d.cuGraphLaunch(entry->exec, stream));
    }
    oldest = entry;
    alike++;
  }
  CUresult code = kSuccess;
  if (alike >= kMaxSameShape) {
    entries_.splice(entries_.begin(), entries_, oldest);
    code = update(work, entries_.front());
  } else {
    if (entries_.size() >= kMaxEntries) {
      destroy(entries_.back());
      entries_.pop_back();
    }
    entries_.emplace_front();
    entries_.front().shape = shape;
    entries_.front().work = work;
    code = build(work, entries_.front());
  }
  if (!code) code = d.cuGraphLaunch(entries_.front().exec, stream);
  if (code) {  // half made or half updated
    destroy(entries_.front());
    entries_.pop_front();
  }
  return context_.note(code);
}

}  // namespace lily::cuda
