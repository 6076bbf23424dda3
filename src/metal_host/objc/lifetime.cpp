// Object lifetime: allocation, reference counts, autorelease pools and the entry points that ARC calls.
#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

using namespace lily::objc;

extern "C" {
// Static data of these classes lies in the binary: never counted.
extern Class lily_constant_string_class __asm__("OBJC_CLASS_$_NSConstantString");
extern Class _NSConcreteStackBlock, _NSConcreteMallocBlock, _NSConcreteGlobalBlock;
}

namespace lily::objc {

Kind kind_of(id object) {
  const Class* cls = object->isa;
  if (cls == &_NSConcreteMallocBlock || cls == &_NSConcreteStackBlock || cls == &_NSConcreteGlobalBlock) return Kind::block;
  if (cls == &lily_constant_string_class || (cls->data->flags & kMetaClass)) return Kind::immortal;
  return Kind::heap;
}

namespace {

std::atomic<long> live_objects{0};

Header* header_of(id object) { return reinterpret_cast<Header*>(object) - 1; }

IMP cached_method(id object, SEL selector) { return require_method(object->isa, selector); }

// C++ members of a class are built from the root down and destroyed from the leaf up.
void construct(const Class* cls, id object) {
  if (!cls) return;
  construct(cls->superclass, object);
  if (IMP imp = find_own_method(cls, ".cxx_construct")) reinterpret_cast<id (*)(id, SEL)>(imp)(object, ".cxx_construct");
}
void destruct(id object) {
  for (const Class* cls = object->isa; cls; cls = cls->superclass)
    if (IMP imp = find_own_method(cls, ".cxx_destruct")) reinterpret_cast<void (*)(id, SEL)>(imp)(object, ".cxx_destruct");
}

void pop_to(std::vector<id>& pool, size_t size) {
  while (pool.size() > size) {  // releasing may autorelease more
    id object = pool.back();
    pool.pop_back();
    objc_release(object);
  }
}

// One stack of pending objects per thread; a pool is the height of the stack when it was pushed.
struct PoolStack {
  std::vector<id> objects;
  ~PoolStack() { pop_to(objects, 0); }
};
thread_local PoolStack pool_stack;

}  // namespace

bool try_retain(id object) {
  if (kind_of(object) != Kind::heap) return objc_retain(object) != nullptr;
  auto& references = header_of(object)->references;
  int64_t count = references.load(std::memory_order_relaxed);
  while (count > 0)
    if (references.compare_exchange_weak(count, count + 1, std::memory_order_acquire)) return true;
  return false;
}

}  // namespace lily::objc

extern "C" {

long lily_objc_live_objects(void) { return live_objects.load(); }

id objc_alloc(Class* cls) {
  void* memory = calloc(1, sizeof(Header) + cls->data->instance_size);
  if (!memory) fail("out of memory for a %s", cls->data->name);
  auto* header = new (memory) Header;
  header->references.store(1, std::memory_order_relaxed);
  header->has_weak.store(0, std::memory_order_relaxed);
  id object = reinterpret_cast<id>(header + 1);
  object->isa = cls;
  live_objects++;
  construct(cls, object);
  return object;
}
id objc_allocWithZone(Class* cls) { return objc_alloc(cls); }

id objc_alloc_init(Class* cls) {
  id object = objc_alloc(cls);
  return reinterpret_cast<id (*)(id, SEL)>(cached_method(object, "init"))(object, "init");
}
id objc_opt_new(Class* cls) { return objc_alloc_init(cls); }
Class* objc_opt_class(id object) {
  if (!object) return nullptr;
  return (object->isa->data->flags & kMetaClass) ? reinterpret_cast<Class*>(object) : object->isa;
}
id objc_opt_self(id object) { return object; }
bool objc_opt_respondsToSelector(id object, SEL selector) { return object && find_method(object->isa, selector); }
bool objc_opt_isKindOfClass(id object, Class* wanted) {
  if (!object) return false;
  for (const Class* cls = object->isa; cls; cls = cls->superclass)
    if (cls == wanted) return true;
  return false;
}

// Called by -[NSObject dealloc], the last step of every dealloc.
void lily_objc_free(id object) {
  destruct(object);
  live_objects--;
  free(header_of(object));
}

// -[NSObject retain] and friends count here; objc_retain goes straight to it, as no class overrides them.
id objc_retain(id object) {
  if (!object) return object;
  switch (kind_of(object)) {
    case Kind::heap:
      header_of(object)->references.fetch_add(1, std::memory_order_relaxed);
      return object;
    case Kind::block:
      // A stack block stays where it is: ARC copies blocks with objc_retainBlock before they can escape.
      return object->isa == &_NSConcreteStackBlock ? object : static_cast<id>(_Block_copy(object));
    case Kind::immortal:
      return object;
  }
  return object;
}

void objc_release(id object) {
  if (!object) return;
  Kind kind = kind_of(object);
  if (kind == Kind::block) return _Block_release(object);
  if (kind == Kind::immortal) return;
  Header* header = header_of(object);
  int64_t before = header->references.fetch_sub(1, std::memory_order_acq_rel);
  if (before <= 0) fail("over-release of a %s", object->isa->data->name);
  if (before > 1) return;
  if (header->has_weak.load(std::memory_order_acquire)) clear_weak_references(object);
  reinterpret_cast<void (*)(id, SEL)>(cached_method(object, "dealloc"))(object, "dealloc");
}

void* objc_autoreleasePoolPush(void) { return reinterpret_cast<void*>(pool_stack.objects.size() + 1); }
void objc_autoreleasePoolPop(void* mark) { pop_to(pool_stack.objects, reinterpret_cast<size_t>(mark) - 1); }
id objc_autorelease(id object) {
  if (object) pool_stack.objects.push_back(object);
  return object;
}

// The hand-over of a returned object without a pool (Apple's runtime inspects the caller) is left out: always the pool.
id objc_autoreleaseReturnValue(id object) { return objc_autorelease(object); }
id objc_retainAutorelease(id object) { return objc_autorelease(objc_retain(object)); }
id objc_retainAutoreleaseReturnValue(id object) { return objc_retainAutorelease(object); }
id objc_retainAutoreleasedReturnValue(id object) { return objc_retain(object); }
id objc_claimAutoreleasedReturnValue(id object) { return objc_retain(object); }
id objc_unsafeClaimAutoreleasedReturnValue(id object) { return object; }
id objc_retainBlock(id block) { return static_cast<id>(_Block_copy(block)); }

void objc_storeStrong(id* location, id object) {
  id old = *location;
  if (old == object) return;
  *location = objc_retain(object);
  objc_release(old);
}

void objc_enumerationMutation(id) { fail("a collection was changed while it was enumerated"); }

// Properties. Atomic object accessors need a lock so that a getter cannot retain what a setter just released.
static std::mutex property_mutex;
id objc_getProperty(id self, SEL, ptrdiff_t offset, bool atomic) {
  id* slot = reinterpret_cast<id*>(reinterpret_cast<char*>(self) + offset);
  if (!atomic) return *slot;
  std::unique_lock<std::mutex> lock(property_mutex);
  id value = objc_retain(*slot);
  lock.unlock();
  return objc_autorelease(value);
}
static void set_property(id self, ptrdiff_t offset, id value, bool copy) {
  if (value && copy) {
    // Everything copyable here is immutable, so a copy of an object is the object.
    value = kind_of(value) == Kind::block ? static_cast<id>(_Block_copy(value)) : objc_retain(value);
  } else {
    value = objc_retain(value);
  }
  id* slot = reinterpret_cast<id*>(reinterpret_cast<char*>(self) + offset);
  std::unique_lock<std::mutex> lock(property_mutex);
  id old = *slot;
  *slot = value;
  lock.unlock();
  objc_release(old);
}
void objc_setProperty_atomic(id self, SEL, id value, ptrdiff_t offset) { set_property(self, offset, value, false); }
void objc_setProperty_nonatomic(id self, SEL, id value, ptrdiff_t offset) { set_property(self, offset, value, false); }
void objc_setProperty_atomic_copy(id self, SEL, id value, ptrdiff_t offset) { set_property(self, offset, value, true); }
void objc_setProperty_nonatomic_copy(id self, SEL, id value, ptrdiff_t offset) { set_property(self, offset, value, true); }
void objc_copyStruct(void* to, const void* from, ptrdiff_t size, bool, bool) {
  std::lock_guard<std::mutex> lock(property_mutex);
  memcpy(to, from, static_cast<size_t>(size));
}
}
