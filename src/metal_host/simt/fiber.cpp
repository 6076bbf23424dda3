// Switching lanes, in assembly: this is the inner loop of every kernel that uses simd operations. Calls and
// returns stay paired (a lane is resumed by a return to where it called from), so that the processor's
// return-address predictor guesses right as long as the lanes run in step.
#include <stddef.h>

#include "fiber.h"

namespace lily {

#if defined(__x86_64__)

__attribute__((naked)) LILY_LANE_CALL uint32_t rendezvous(uint32_t) {
  asm volatile(
      "movq %%rsp, %%rax\n\t"
      "andq %[region], %%rax\n\t"                     // rax = worker
      "movq %c[simdgroup](%%rax), %%rbx\n\t"          // rbx = simdgroup
      "movl %c[lane](%%rax), %%ecx\n\t"               // ecx = lane
      "movl %%r12d, %c[site](%%rbx,%%rcx,4)\n\t"      // r12d = site: the first argument of preserve_none
      "pushq %%rbp\n\t"
      "movq %%rsp, %c[stack](%%rbx,%%rcx,8)\n\t"
      "movl %c[runnable](%%rbx), %%edx\n\t"
      "btrl %%ecx, %%edx\n\t"
      "movl %%edx, %c[runnable](%%rbx)\n\t"
      "movl $-2, %%esi\n\t"
      "shlxl %%ecx, %%esi, %%esi\n\t"
      "andl %%edx, %%esi\n\t"                         // runnable lanes above this one, else all
      "cmovzl %%edx, %%esi\n\t"
      "tzcntl %%esi, %%esi\n\t"                       // esi = next lane; carry: none
      "jc 1f\n\t"
      "movl %c[special](%%rbx), %%edi\n\t"
      "btl %%esi, %%edi\n\t"
      "jc 1f\n\t"
      "movl %%esi, %c[lane](%%rax)\n\t"
      "movq %c[stack](%%rbx,%%rsi,8), %%rsp\n\t"
      "popq %%rbp\n\t"
      "xorl %%eax, %%eax\n\t"
      "retq\n"
      "1:\n\t"
      "movq %%rax, %%rdi\n\t"
      "callq lily_after_stop\n\t"
      "testq %%rax, %%rax\n\t"
      "jz 2f\n\t"
      "movq %%rax, %%rsp\n"
      "2:\n\t"
      "popq %%rbp\n\t"
      "movl %%edx, %%eax\n\t"
      "retq"
      :
      : [region] "i"(-int64_t(LILY_REGION_BYTES)), [simdgroup] "i"(offsetof(LilyWorkerHeader, simdgroup)), [lane] "i"(offsetof(LilyWorkerHeader, lane)),
        [site] "i"(offsetof(Simdgroup, site)), [stack] "i"(offsetof(Simdgroup, stack)), [runnable] "i"(offsetof(Simdgroup, runnable)),
        [special] "i"(offsetof(Simdgroup, special)));
}

asm(R"(
.text
.globl lily_enter
.hidden lily_enter
.type lily_enter, @function
lily_enter:
  pushq %r15
  pushq %r14
  pushq %r13
  pushq %r12
  pushq %rbx
  pushq %rbp
  leaq 1f(%rip), %rax
  pushq %rax
  pushq %rbp
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %rbp
  retq
1:
  popq %rbp
  popq %rbx
  popq %r12
  popq %r13
  popq %r14
  popq %r15
  retq
.size lily_enter, .-lily_enter

.globl lily_leave
.hidden lily_leave
.type lily_leave, @function
lily_leave:
  movq %rdi, %rsp
  popq %rbp
  movl %esi, %eax
  retq
.size lily_leave, .-lily_leave
)");

#else
#error "this processor is not supported yet"
#endif

}  // namespace lily
