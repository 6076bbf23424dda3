// Objective-C runtime subset for ELF: what clang emits for -fobjc-runtime=macosx-10.15 with ARC and blocks.
// Class metadata is static data and selectors are C strings, so nothing has to be registered at load time.
// Left out: categories, +load/+initialize, protocols at run time, Objective-C exceptions, message forwarding.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

typedef struct objc_object* id;
typedef const char* SEL;
typedef void (*IMP)(void);

namespace lily::objc {

// The compiler lays these out (Objective-C 2 metadata); field order is ABI.
struct Method {
  SEL name;
  const char* types;
  IMP imp;
};
struct MethodList {
  uint32_t entry_size, count;
  Method methods[1];
};
struct ClassData {
  uint32_t flags, instance_start, instance_size, reserved;
  const uint8_t* strong_layout;
  const char* name;
  const MethodList* methods;
  const void* protocols;
  const void* ivars;
  const uint8_t* weak_layout;
  const void* properties;
};
struct Class {
  Class* isa;
  Class* superclass;
  void* cache;
  void* vtable;
  const ClassData* data;
};

constexpr uint32_t kMetaClass = 1;

// Lies before every object that alloc made. Constant strings, classes and blocks have none.
struct alignas(16) Header {
  std::atomic<int64_t> references;
  std::atomic<uint32_t> has_weak;
  uint32_t unused;
};

enum class Kind { heap, immortal, block };
Kind kind_of(id object);
IMP find_method(const Class* cls, SEL selector);          // null when no class of the chain has it
IMP find_own_method(const Class* cls, const char* name);  // not its superclasses
IMP require_method(Class* cls, SEL selector);             // aborts when there is none
[[noreturn]] void fail(const char* format, ...);

// Weak references; lifetime.cpp owns the counts.
void clear_weak_references(id object);
bool try_retain(id object);

}  // namespace lily::objc

struct objc_object {
  lily::objc::Class* isa;
};

extern "C" {
id objc_retain(id object);
void objc_release(id object);
id objc_autorelease(id object);
void* _Block_copy(const void* block);
void _Block_release(const void* block);
__attribute__((visibility("default"))) long lily_objc_live_objects(void);
}
