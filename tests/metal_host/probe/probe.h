// A program of small scenarios for the software Metal, one per run: probe NAME. Exit 0 and what a scenario prints are
// checked by test_framework*.py and tests/native/test_objc.py; some must abort().
#pragma once
#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "%s:%d: CHECK failed: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                    \
    }                                                                             \
  } while (0)

struct Scenario {
  const char* name;
  void (*run)();
};
extern const Scenario objc_scenarios[], metal_scenarios[];  // each ends with a null name
extern "C" long lily_objc_live_objects(void);
