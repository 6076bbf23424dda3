// Small helpers of the framework's classes.
#pragma once
#import <Foundation/Foundation.h>

#include "support_text.h"

namespace lily::metal {

NSString* string(const std::string& text);
std::string text_of(NSString* string);
NSError* make_error(NSErrorDomain domain, NSInteger code, const std::string& text);

}  // namespace lily::metal
