// Message dispatch: method lookup, its cache, and the objc_msgSend family for x86-64.
#include "runtime.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace lily::objc {

void fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  fputs("lily objc runtime: ", stderr);
  vfprintf(stderr, format, args);
  fputc('\n', stderr);
  va_end(args);
  abort();
}

IMP find_own_method(const Class* cls, const char* name) {
  const MethodList* list = cls->data->methods;
  if (!list) return nullptr;
  for (uint32_t i = 0; i < list->count; i++)
    if (strcmp(list->methods[i].name, name) == 0) return list->methods[i].imp;
  return nullptr;
}

IMP find_method(const Class* cls, SEL selector) {
  for (; cls; cls = cls->superclass)
    if (IMP imp = find_own_method(cls, selector)) return imp;
  return nullptr;
}

namespace {

// One immutable node per (class, selector address) ever sent. The assembly below reads `lily_objc_cache`
// without a lock: an entry is a pointer to a node that is never freed, so it is either old or new but whole.
struct Node {
  Class* cls;
  SEL selector;
  IMP imp;
};
struct Key {
  Class* cls;
  SEL selector;
  bool operator==(const Key& other) const { return cls == other.cls && selector == other.selector; }
};
struct KeyHash {
  size_t operator()(const Key& key) const { return (uintptr_t)key.cls * 31 + (uintptr_t)key.selector; }
};
std::mutex nodes_mutex;
std::unordered_map<Key, const Node*, KeyHash>& all_nodes() {
  static auto* nodes = new std::unordered_map<Key, const Node*, KeyHash>;  // outlives static destructors
  return *nodes;
}
const Node kEmpty = {nullptr, nullptr, nullptr};

}  // namespace
}  // namespace lily::objc

extern "C" {
// 1,024 entries, filled with a pointer to an empty node so that the fast path needs no null check.
__attribute__((visibility("hidden"))) std::atomic<const void*> lily_objc_cache[1024];
}

namespace lily::objc {
namespace {
struct FillCache {
  FillCache() {
    for (auto& entry : lily_objc_cache) entry.store(&kEmpty, std::memory_order_relaxed);
  }
};
// Before any static initialiser of Objective-C code may send a message.
__attribute__((init_priority(101))) FillCache fill_cache;
}  // namespace

IMP require_method(Class* cls, SEL selector) {
  std::lock_guard<std::mutex> lock(nodes_mutex);
  const Node*& node = all_nodes()[{cls, selector}];
  if (!node) {
    IMP imp = find_method(cls, selector);
    if (!imp) fail("unrecognized selector %c[%s %s]", cls->data->flags & kMetaClass ? '+' : '-', cls->data->name, selector);
    node = new Node{cls, selector, imp};
  }
  // The same hash as in objc_msgSend below.
  size_t slot = ((((uintptr_t)cls) >> 3) ^ (uintptr_t)selector) & 1023;
  lily_objc_cache[slot].store(node, std::memory_order_release);
  return node->imp;
}

}  // namespace lily::objc

using namespace lily::objc;

extern "C" {
// Referred to by the metadata of every class; this runtime keeps its caches elsewhere.
void* _objc_empty_cache;
void* _objc_empty_vtable;

__attribute__((visibility("hidden"))) IMP lily_objc_lookup(id self, SEL selector) { return require_method(self->isa, selector); }

struct SuperCall {
  id receiver;
  Class* cls;
};
__attribute__((visibility("hidden"))) IMP lily_objc_lookup_super(SuperCall* call, SEL selector) {
  return require_method(call->cls->superclass, selector);
}
}

#if defined(__x86_64__)
// Every argument register of the System V ABI must survive the lookup: rdi..r9, al (count of vector arguments) and xmm0..7.
asm(R"(
.text
.macro LILY_SAVE
  pushq %rbp
  movq %rsp,%rbp
  subq $192,%rsp
  movq %rdi,-8(%rbp)
  movq %rsi,-16(%rbp)
  movq %rdx,-24(%rbp)
  movq %rcx,-32(%rbp)
  movq %r8,-40(%rbp)
  movq %r9,-48(%rbp)
  movq %rax,-56(%rbp)
  movups %xmm0,-80(%rbp)
  movups %xmm1,-96(%rbp)
  movups %xmm2,-112(%rbp)
  movups %xmm3,-128(%rbp)
  movups %xmm4,-144(%rbp)
  movups %xmm5,-160(%rbp)
  movups %xmm6,-176(%rbp)
  movups %xmm7,-192(%rbp)
.endm
.macro LILY_RESTORE
  movq %rax,%r11
  movq -8(%rbp),%rdi
  movq -16(%rbp),%rsi
  movq -24(%rbp),%rdx
  movq -32(%rbp),%rcx
  movq -40(%rbp),%r8
  movq -48(%rbp),%r9
  movq -56(%rbp),%rax
  movups -80(%rbp),%xmm0
  movups -96(%rbp),%xmm1
  movups -112(%rbp),%xmm2
  movups -128(%rbp),%xmm3
  movups -144(%rbp),%xmm4
  movups -160(%rbp),%xmm5
  movups -176(%rbp),%xmm6
  movups -192(%rbp),%xmm7
  leave
.endm

.globl objc_msgSend
.type objc_msgSend,@function
objc_msgSend:
  testq %rdi,%rdi
  je 1f
  movq (%rdi),%r11
  shrq $3,%r11
  xorq %rsi,%r11
  andl $1023,%r11d
  leaq lily_objc_cache(%rip),%r10
  movq (%r10,%r11,8),%r11
  movq (%rdi),%r10
  cmpq %r10,(%r11)
  jne 2f
  cmpq %rsi,8(%r11)
  jne 2f
  jmpq *16(%r11)
2:
  LILY_SAVE
  callq lily_objc_lookup
  LILY_RESTORE
  jmpq *%r11
1:
  xorl %eax,%eax
  xorl %edx,%edx
  xorps %xmm0,%xmm0
  xorps %xmm1,%xmm1
  retq
.size objc_msgSend,.-objc_msgSend

# The result is written through rdi, so the receiver is rsi and the selector rdx.
.globl objc_msgSend_stret
.type objc_msgSend_stret,@function
objc_msgSend_stret:
  testq %rsi,%rsi
  je 1f
  LILY_SAVE
  movq %rsi,%rdi
  movq %rdx,%rsi
  callq lily_objc_lookup
  LILY_RESTORE
  jmpq *%r11
1:
  movq %rdi,%rax
  retq
.size objc_msgSend_stret,.-objc_msgSend_stret

# rdi points to {receiver, class whose superclass is searched}.
.globl objc_msgSendSuper2
.type objc_msgSendSuper2,@function
objc_msgSendSuper2:
  LILY_SAVE
  callq lily_objc_lookup_super
  LILY_RESTORE
  movq (%rdi),%rdi
  jmpq *%r11
.size objc_msgSendSuper2,.-objc_msgSendSuper2

# C++ exceptions pass through ARC code; there are no Objective-C ones, so the C++ personality does.
.globl __objc_personality_v0
.type __objc_personality_v0,@function
__objc_personality_v0:
  jmp __gxx_personality_v0@PLT
.size __objc_personality_v0,.-__objc_personality_v0
)");
#else
#error "the Objective-C runtime subset knows x86-64 only"
#endif
