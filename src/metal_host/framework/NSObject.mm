// The root class. Compiled without ARC: it implements what ARC calls.
#import <Foundation/Foundation.h>

extern "C" {
id objc_alloc(Class cls);
id objc_retain(id object);
void objc_release(id object);
id objc_autorelease(id object);
bool objc_opt_isKindOfClass(id object, Class cls);
bool objc_opt_respondsToSelector(id object, SEL selector);
void lily_objc_free(id object);
}

@implementation NSObject
+ (instancetype)alloc {
  return objc_alloc((Class)self);
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return (Class)self;
}
- (instancetype)init {
  return self;
}
- (instancetype)self {
  return self;
}
- (Class)class {
  return isa;
}
- (NSUInteger)hash {
  return (NSUInteger)(void*)self;
}
- (BOOL)isEqual:(id)object {
  return object == self;
}
- (BOOL)isKindOfClass:(Class)cls {
  return objc_opt_isKindOfClass(self, cls);
}
- (BOOL)respondsToSelector:(SEL)selector {
  return objc_opt_respondsToSelector(self, selector);
}
- (instancetype)retain {
  return objc_retain(self);
}
- (oneway void)release {
  objc_release(self);
}
- (instancetype)autorelease {
  return objc_autorelease(self);
}
- (NSUInteger)retainCount {
  return 1;
}
- (id)copy {
  return [(id<NSCopying>)self copyWithZone:nil];
}
- (void)dealloc {
  lily_objc_free(self);
}
@end
