// Instruction sets of this CPU. By cpuid: __builtin_cpu_supports answers "no" to everything under zig's runtime library.
#include "cpu.h"

#include <cpuid.h>

namespace lily::metal {
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return Registers();
  return r;
}

// Which register sets the system saves on a context switch.
unsigned saved_state() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool has(unsigned value, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(value >> bit & 1)) return false;
  return true;
}

int level() {  // 0, 3, 4, or 5 for v4 with bf16
  Registers basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  const int fma = 12, movbe = 22, osxsave = 27, avx = 28, f16c = 29;
  if (!has(basic.c, {fma, movbe, osxsave, avx, f16c})) return 0;
  unsigned state = saved_state();
  const int bmi1 = 3, avx2 = 5, bmi2 = 8;
  if (!has(state, {1, 2}) || !has(extended.b, {bmi1, avx2, bmi2})) return 0;
  const int f = 16, dq = 17, cd = 28, bw = 30, vl = 31;
  if (!has(state, {5, 6, 7}) || !has(extended.b, {f, dq, cd, bw, vl})) return 3;
  const int vbmi = 1, vbmi2 = 6, vnni = 11, bf16 = 5;
  return has(extended.c, {vbmi, vbmi2, vnni}) && has(more.a, {bf16}) ? 5 : 4;
}

}  // namespace

bool cpu_runs(const std::string& target) {
  static const int found = level();
  if (target == "x86-64-v3") return found >= 3;
  if (target == "x86-64-v4") return found >= 4;
  if (target == "x86-64-v4-bf16") return found >= 5;
  return false;
}

}  // namespace lily::metal
