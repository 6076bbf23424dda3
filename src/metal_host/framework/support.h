// Small helpers of the framework's classes.
#pragma once
#import <Foundation/Foundation.h>

#include <string>

namespace lily::metal {

// What Metal's validation layer would reject: one line on stderr, then abort().
[[noreturn]] __attribute__((format(printf, 1, 2))) void programming_error(const char* format, ...);

NSString* string(const std::string& text);
std::string text_of(NSString* string);
NSError* make_error(NSErrorDomain domain, NSInteger code, const std::string& text);

std::string sha256_hex(const std::string& text);  // 64 hexadecimal digits
std::string folder_of_this_library();             // where the extension lies, by dladdr

}  // namespace lily::metal
