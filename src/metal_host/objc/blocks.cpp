// Block runtime: copying closures from the stack to the heap, and the __block variables and objects that they capture.
// Layouts and flag values are clang's block ABI (clang/docs/Block-ABI-Apple.rst).
#include "runtime.h"

#include <cstdlib>
#include <cstring>

using namespace lily::objc;

namespace {

struct Descriptor {
  uintptr_t reserved, size;
  void (*copy)(void* to, const void* from);  // these two only with kHasCopyDispose
  void (*dispose)(const void* block);
};
struct Block {
  void* isa;
  std::atomic<int32_t> flags;
  int32_t reserved;
  void (*invoke)(void*, ...);
  Descriptor* descriptor;
};
struct ByRef {  // a __block variable
  void* isa;
  ByRef* forwarding;
  std::atomic<int32_t> flags;
  uint32_t size;
  void (*keep)(ByRef* to, ByRef* from);  // these two only with kHasCopyDispose
  void (*destroy)(ByRef*);
};

constexpr int32_t kCountMask = 0xfffe;  // the count is kept in steps of two, the low bit means "deallocating"
constexpr int32_t kNeedsFree = 1 << 24;
constexpr int32_t kHasCopyDispose = 1 << 25;
constexpr int32_t kIsGlobal = 1 << 28;

constexpr int kFieldIsObject = 3, kFieldIsBlock = 7, kFieldIsByRef = 8, kFieldIsWeak = 16, kByRefCaller = 128;

void byref_release(ByRef* variable) {
  variable = variable->forwarding;
  if (!(variable->flags.load() & kNeedsFree)) return;
  if ((variable->flags.fetch_sub(2) & kCountMask) != 2) return;
  if (variable->flags.load() & kHasCopyDispose) variable->destroy(variable);
  free(variable);
}

ByRef* byref_copy(ByRef* source) {
  ByRef* current = source->forwarding;
  if (current->flags.load() & kNeedsFree) {  // already on the heap
    current->flags.fetch_add(2);
    return current;
  }
  auto* copy = static_cast<ByRef*>(malloc(source->size));
  if (!copy) fail("out of memory for a __block variable");
  memcpy(static_cast<void*>(copy), source, source->size);
  // Two references: the block that copies it and the stack frame that declared it.
  copy->flags.store((source->flags.load() & ~0xffff) | kNeedsFree | 4);
  copy->isa = nullptr;
  copy->forwarding = copy;
  source->forwarding = copy;
  if (source->flags.load() & kHasCopyDispose) copy->keep(copy, source);
  return copy;
}

}  // namespace

extern "C" {

void* _Block_copy(const void* source) {
  if (!source) return nullptr;
  auto* block = static_cast<Block*>(const_cast<void*>(source));
  int32_t flags = block->flags.load();
  if (flags & kIsGlobal) return block;
  if (flags & kNeedsFree) {
    block->flags.fetch_add(2);
    return block;
  }
  extern Class _NSConcreteMallocBlock;
  auto* copy = static_cast<Block*>(malloc(block->descriptor->size));
  if (!copy) fail("out of memory for a block");
  memcpy(static_cast<void*>(copy), block, block->descriptor->size);
  copy->isa = &_NSConcreteMallocBlock;
  copy->flags.store((flags & ~0xffff) | kNeedsFree | 2);
  if (flags & kHasCopyDispose) copy->descriptor->copy(copy, block);
  return copy;
}

void _Block_release(const void* source) {
  auto* block = static_cast<Block*>(const_cast<void*>(source));
  if (!block || (block->flags.load() & kIsGlobal) || !(block->flags.load() & kNeedsFree)) return;
  int32_t before = block->flags.fetch_sub(2);
  if ((before & kCountMask) == 0) fail("over-release of a block");
  if ((before & kCountMask) != 2) return;
  if (before & kHasCopyDispose) block->descriptor->dispose(block);
  free(block);
}

// Called by the copy helper that the compiler generates, once per captured object, block or __block variable.
void _Block_object_assign(void* to, const void* object, int flags) {
  void** slot = static_cast<void**>(to);
  void* value = const_cast<void*>(object);
  if (flags & kByRefCaller) {  // the contents of a __block variable: moved with it, ARC generates its own helpers
    *slot = value;
    return;
  }
  switch (flags & ~kFieldIsWeak) {
    case kFieldIsByRef: *slot = byref_copy(static_cast<ByRef*>(value)); break;
    case kFieldIsBlock: *slot = _Block_copy(value); break;
    case kFieldIsObject: *slot = objc_retain(static_cast<id>(value)); break;
    default: *slot = value;
  }
}

void _Block_object_dispose(const void* object, int flags) {
  if (!object || (flags & kByRefCaller)) return;
  void* value = const_cast<void*>(object);
  switch (flags & ~kFieldIsWeak) {
    case kFieldIsByRef: byref_release(static_cast<ByRef*>(value)); break;
    case kFieldIsBlock: _Block_release(value); break;
    case kFieldIsObject: objc_release(static_cast<id>(value)); break;
    default: break;
  }
}
}

// The classes of blocks, so that messages to a block ([block copy]) work.
namespace {

id block_copy(id self, SEL) { return static_cast<id>(_Block_copy(self)); }
id block_retain(id self, SEL) { return objc_retain(self); }
void block_release(id self, SEL) { _Block_release(self); }
id block_autorelease(id self, SEL) { return objc_autorelease(self); }

struct BlockMethods {
  uint32_t entry_size, count;
  Method methods[4];
};
BlockMethods block_methods = {sizeof(Method), 4,
                              {{"copy", "@16@0:8", reinterpret_cast<IMP>(block_copy)},
                               {"retain", "@16@0:8", reinterpret_cast<IMP>(block_retain)},
                               {"release", "v16@0:8", reinterpret_cast<IMP>(block_release)},
                               {"autorelease", "@16@0:8", reinterpret_cast<IMP>(block_autorelease)}}};
const ClassData block_data = {0,       0,       sizeof(Block), 0,       nullptr, "NSBlock", reinterpret_cast<const MethodList*>(&block_methods),
                              nullptr, nullptr, nullptr,       nullptr};

}  // namespace

extern "C" {
// `isa` null: nobody asks a block's class for class methods.
Class _NSConcreteStackBlock = {nullptr, nullptr, nullptr, nullptr, &block_data};
Class _NSConcreteMallocBlock = {nullptr, nullptr, nullptr, nullptr, &block_data};
Class _NSConcreteGlobalBlock = {nullptr, nullptr, nullptr, nullptr, &block_data};
}
