// Helpers of the software Metal that need no Objective-C.
#pragma once
#include <string>

namespace lily::metal {

// What Metal's validation layer would reject: one line on stderr, then abort().
[[noreturn]] __attribute__((format(printf, 1, 2))) void programming_error(const char* format, ...);

std::string sha256_hex(const std::string& text);  // 64 hexadecimal digits
std::string folder_of_this_library();             // where the extension lies, by dladdr

}  // namespace lily::metal
