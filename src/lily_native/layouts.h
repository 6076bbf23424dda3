// Sizes and offsets of the structs of metal/common.h as the compiler sees them, for the test that Python packs alike.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace lily {

struct StructLayout {
  std::string name;
  size_t size;
  std::vector<std::pair<std::string, size_t>> fields;  // name, offset
};
std::vector<StructLayout> struct_layouts();

}  // namespace lily
