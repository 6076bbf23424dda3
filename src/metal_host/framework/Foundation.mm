// Strings, arrays, dictionaries, errors and process activities: immutable, and only what Metal's interface hands around.
#import <Foundation/Foundation.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "support.h"

NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";
NSErrorUserInfoKey const NSUnderlyingErrorKey = @"NSUnderlyingError";

@interface LilyString : NSString {
 @public
  std::string text;
}
@end

@implementation NSString
+ (instancetype)stringWithUTF8String:(const char*)text {
  LilyString* string = [LilyString new];
  string->text = text;
  return (id)string;
}
- (const char*)UTF8String {
  return "";
}
- (NSUInteger)length {
  NSUInteger units = 0;
  for (const char* p = [self UTF8String]; *p; p++) {
    unsigned char byte = static_cast<unsigned char>(*p);
    if ((byte & 0xC0) != 0x80) units += byte >= 0xF0 ? 2 : 1;  // a surrogate pair beyond U+FFFF
  }
  return units;
}
- (NSUInteger)hash {
  NSUInteger value = 1469598103934665603u;
  for (const char* p = [self UTF8String]; *p; p++) value = (value ^ static_cast<unsigned char>(*p)) * 1099511628211u;
  return value;
}
- (BOOL)isEqualToString:(NSString*)other {
  return other && strcmp([self UTF8String], [other UTF8String]) == 0;
}
- (BOOL)isEqual:(id)other {
  return [other isKindOfClass:[NSString class]] && [self isEqualToString:other];
}
- (id)copyWithZone:(NSZone*)zone {
  return self;
}
@end

@implementation LilyString
- (const char*)UTF8String {
  return text.c_str();
}
@end

// What the compiler emits for @"…".
struct ConstantString {
  void* isa;
  int flags;
  const char* bytes;
  long length;
};
__asm__(".globl __CFConstantStringClassReference\n.set __CFConstantStringClassReference, OBJC_CLASS_$_NSConstantString");

static std::string utf8_of_utf16(const uint16_t* units, long count) {
  std::string text;
  for (long i = 0; i < count; i++) {
    uint32_t code = units[i];
    if (code >= 0xD800 && code < 0xDC00 && i + 1 < count) code = 0x10000 + ((code - 0xD800) << 10) + (units[++i] - 0xDC00u);
    if (code < 0x80) {
      text += static_cast<char>(code);
      continue;
    }
    int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    text += static_cast<char>((0xF00 >> (more + 1) & 0xFF) | code >> (6 * more));
    while (more--) text += static_cast<char>(0x80 | (code >> (6 * more) & 0x3F));
  }
  return text;
}

@implementation NSConstantString
- (const char*)UTF8String {
  auto* constant = (__bridge ConstantString*)self;
  constexpr int kUtf16 = 0x10;  // literals outside ASCII
  if (!(constant->flags & kUtf16)) return constant->bytes;
  static std::mutex mutex;
  static auto* converted = new std::map<void*, std::string>;  // literals live for ever, so do their conversions
  std::lock_guard<std::mutex> lock(mutex);
  std::string& text = (*converted)[constant];
  if (text.empty()) text = utf8_of_utf16(reinterpret_cast<const uint16_t*>(constant->bytes), constant->length);
  return text.c_str();
}
@end

@interface LilyArray : NSArray {
 @public
  std::vector<id> items;
}
@end

@implementation NSArray
+ (instancetype)arrayWithObjects:(const id __unsafe_unretained[])objects count:(NSUInteger)count {
  LilyArray* array = [LilyArray new];
  array->items.assign(objects, objects + count);
  return (id)array;
}
- (NSUInteger)count {
  return 0;
}
- (id)objectAtIndex:(NSUInteger)index {
  return nil;
}
- (id)objectAtIndexedSubscript:(NSUInteger)index {
  return [self objectAtIndex:index];
}
- (id)firstObject {
  return [self count] ? [self objectAtIndex:0] : nil;
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id __unsafe_unretained[])buffer
                                    count:(NSUInteger)length {
  static unsigned long never_changes = 0;
  NSUInteger first = state->state, n = 0;
  // The array holds its items as long as the loop holds the array, so the loop may use them unretained.
  for (; n < length && first + n < [self count]; n++) buffer[n] = [self objectAtIndex:first + n];
  state->state = first + n;
  state->itemsPtr = buffer;
  state->mutationsPtr = &never_changes;
  return n;
}
@end

@implementation LilyArray
- (NSUInteger)count {
  return items.size();
}
- (id)objectAtIndex:(NSUInteger)index {
  if (index >= items.size()) lily::metal::programming_error("objectAtIndex: index %lu is beyond the array's %zu items", index, items.size());
  return items[index];
}
@end

@interface LilyDictionary : NSDictionary {
 @public
  std::vector<id> keys, objects;
}
@end

@implementation NSDictionary
+ (instancetype)dictionaryWithObjects:(const id __unsafe_unretained[])objects
                              forKeys:(const id __unsafe_unretained[])keys
                                count:(NSUInteger)count {
  LilyDictionary* dictionary = [LilyDictionary new];
  dictionary->keys.assign(keys, keys + count);
  dictionary->objects.assign(objects, objects + count);
  return (id)dictionary;
}
- (NSUInteger)count {
  return 0;
}
- (id)objectForKey:(id)key {
  return nil;
}
- (id)objectForKeyedSubscript:(id)key {
  return [self objectForKey:key];
}
@end

@implementation LilyDictionary
- (NSUInteger)count {
  return keys.size();
}
- (id)objectForKey:(id)key {  // a handful of entries: a search is as good as a table
  for (size_t i = 0; i < keys.size(); i++)
    if ([keys[i] isEqual:key]) return objects[i];
  return nil;
}
@end

@implementation NSError {
  NSErrorDomain _domain;
  NSInteger _code;
  NSDictionary* _userInfo;
}
@synthesize domain = _domain, code = _code, userInfo = _userInfo;
+ (instancetype)errorWithDomain:(NSErrorDomain)domain code:(NSInteger)code userInfo:(NSDictionary*)info {
  NSError* error = [NSError new];
  error->_domain = domain;
  error->_code = code;
  error->_userInfo = info;
  return (id)error;
}
- (NSString*)localizedDescription {
  NSString* text = _userInfo[NSLocalizedDescriptionKey];
  if (text) return text;
  return lily::metal::string("The operation couldn’t be completed. (" + std::string([_domain UTF8String]) + " error " + std::to_string(_code) + ".)");
}
@end

@implementation NSProcessInfo
+ (NSProcessInfo*)processInfo {
  return [NSProcessInfo new];
}
// Nothing throttles background processes here; the activity is an object so that callers can be checked for leaks.
- (id<NSObject>)beginActivityWithOptions:(NSActivityOptions)options reason:(NSString*)reason {
  return [NSObject new];
}
- (void)endActivity:(id<NSObject>)activity {
}
- (BOOL)isLowPowerModeEnabled {
  return NO;
}
@end
