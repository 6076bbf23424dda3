// The Objective-C runtime subset: messages, counts, pools, weak references, blocks, exceptions through ARC code.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "probe.h"

@interface Animal : NSObject {
 @public
  std::string noise;
}
@property(strong) Animal* friendOfMine;
@property(copy) NSString* name;
- (int)legs;
- (double)weighted:(double)a with:(float)b and:(int)c sum:(long)d over:(int)e then:(int)f last:(int)g;
- (MTLSize)dimensions;
@end
@implementation Animal
- (instancetype)init {
  self = [super init];
  noise = "none";
  return self;
}
- (int)legs {
  return 4;
}
- (double)weighted:(double)a with:(float)b and:(int)c sum:(long)d over:(int)e then:(int)f last:(int)g {
  return a + b + c + d + e + f + g;
}
- (MTLSize)dimensions {
  return MTLSizeMake(1, 2, 3);
}
@end
@interface Bird : Animal
@end
@implementation Bird
- (int)legs {
  return [super legs] - 2;
}
@end

static void messages() {
  @autoreleasepool {
    Animal *animal = [Animal new], *bird = [[Bird alloc] init];
    CHECK([animal legs] == 4 && [bird legs] == 2);
    CHECK(bird->noise == "none");
    CHECK([bird isKindOfClass:[Animal class]] && ![animal isKindOfClass:[Bird class]]);
    CHECK([bird respondsToSelector:@selector(legs)] && ![bird respondsToSelector:@selector(count)]);
    CHECK([bird weighted:0.5 with:0.25f and:1 sum:2 over:3 then:4 last:5] == 15.75);
    CHECK([bird dimensions].depth == 3);
    Animal* none = nil;
    CHECK([none legs] == 0 && [none dimensions].width == 0 && [none weighted:1 with:1 and:1 sum:1 over:1 then:1 last:1] == 0);
    for (int i = 0; i < 3; i++) CHECK([@"abc" isEqualToString:[NSString stringWithUTF8String:"abc"]]);
    CHECK([@"añ😀" length] == 4);
  }
}

static void counts() {
  @autoreleasepool {
    Animal* animal = [Animal new];
    animal.friendOfMine = [Bird new];
    animal.name = [NSString stringWithUTF8String:"Ann"];
    CHECK(lily_objc_live_objects() == 3);
    animal.friendOfMine = nil;
    CHECK(lily_objc_live_objects() <= 3);
    std::vector<Animal*> many;
    for (int i = 0; i < 100; i++) many.push_back([Animal new]);
    CHECK(lily_objc_live_objects() >= 102);
  }
  CHECK(lily_objc_live_objects() == 0);
}

static void weak_references() {
  __weak Animal* seen;
  @autoreleasepool {
    Animal* animal = [Animal new];
    seen = animal;
    __weak Animal* copy = seen;
    CHECK(copy == animal);
    animal.friendOfMine = nil;
  }
  CHECK(seen == nil);
  // Taking a weak reference while another thread drops the last strong one gives the object or nil, never a corpse.
  for (int round = 0; round < 2000; round++) {
    __strong Animal* animal = [Animal new];
    __weak Animal* weak = animal;
    std::thread reader([&weak] {
      @autoreleasepool {
        Animal* got = weak;
        if (got) CHECK(got->noise == "none");
      }
    });
    animal = nil;
    reader.join();
  }
  CHECK(lily_objc_live_objects() == 0);
}

static void blocks() {
  @autoreleasepool {
    __block int calls = 0;
    __block Animal* moved = [Animal new];
    Animal* captured = [Bird new];
    std::string text = "text";
    void (^stored)(int) = ^(int n) {
      calls += n + [captured legs] + static_cast<int>(text.size()) + [moved legs];
    };
    std::vector<void (^)(int)> handlers = {stored, stored, [stored copy]};
    for (auto handler : handlers) handler(1);
    CHECK(calls == 3 * (1 + 2 + 4 + 4));
    void (^nested)(void) = ^{
      void (^inner)(void) = ^{
        calls += [captured legs];
      };
      inner();
    };
    nested();
    CHECK(calls == 35);
    moved = nil;
    std::thread other([stored, captured] { CHECK([captured legs] == 2); });
    other.join();
  }
  CHECK(lily_objc_live_objects() == 0);
}

static void throwing(Animal* animal) {
  Animal* local = [Animal new];
  local.friendOfMine = animal;
  throw std::runtime_error("through ARC");
}
static void exceptions() {
  @autoreleasepool {
    Animal* animal = [Animal new];
    for (int i = 0; i < 10; i++) {
      try {
        throwing(animal);
        CHECK(false);
      } catch (const std::runtime_error& error) {
        CHECK(std::string(error.what()) == "through ARC");
      }
    }
    CHECK(lily_objc_live_objects() <= 1 + 10);  // pools may hold what properties returned
  }
  CHECK(lily_objc_live_objects() == 0);
}

static void threads() {
  @autoreleasepool {
    Animal* shared = [Animal new];
    std::vector<std::thread> all;
    for (int t = 0; t < 4; t++)
      all.emplace_back([shared] {
        @autoreleasepool {
          for (int i = 0; i < 20000; i++) {
            Animal* mine = [Animal new];
            shared.friendOfMine = mine;
            Animal* theirs = shared.friendOfMine;
            CHECK([theirs legs] == 4);
          }
        }
      });
    for (auto& thread : all) thread.join();
  }
  CHECK(lily_objc_live_objects() == 0);
}

static void collections() {
  @autoreleasepool {
    id items[] = {@"one", @"two", [Animal new]};
    NSArray* array = [NSArray arrayWithObjects:items count:3];
    int seen = 0;
    for (id item in array) seen += item != nil;
    CHECK(seen == 3 && [array[1] isEqual:@"two"]);
    id keys[] = {@"key"}, values[] = {@"value"};
    NSDictionary* dictionary = [NSDictionary dictionaryWithObjects:values forKeys:keys count:1];
    CHECK([dictionary[[NSString stringWithUTF8String:"key"]] isEqual:@"value"] && dictionary[@"none"] == nil);
    NSError* error = [NSError errorWithDomain:@"D" code:7 userInfo:nil];
    CHECK([error code] == 7 && std::string([[error localizedDescription] UTF8String]).find("error 7") != std::string::npos);
  }
  CHECK(lily_objc_live_objects() == 0);
}

static void unknown_selector() {
  id animal = [Animal new];
  [(NSArray*)animal count];
}

const Scenario objc_scenarios[] = {
    {"messages", messages}, {"counts", counts},   {"weak", weak_references},       {"blocks", blocks},   {"exceptions", exceptions},
    {"threads", threads},   {"collections", collections}, {"unknown_selector", unknown_selector}, {nullptr, nullptr},
};
