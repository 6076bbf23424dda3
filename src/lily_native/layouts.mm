#include "layouts.h"

#include <cstddef>

#include "common.h"

namespace lily {

std::vector<StructLayout> struct_layouts() {
  return {
#include "layouts.inc"  // made by make_layouts.py from metal/common.h
  };
}

}  // namespace lily
