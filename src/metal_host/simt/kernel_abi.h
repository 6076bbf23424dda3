// Memory layout and functions shared by the engine and the code of compiled kernels.
//
// Every lane runs on a stack inside its worker's region, a block of address space aligned to its own
// size, so kernel code finds the worker's header by masking the stack pointer: no thread-local variable
// and no extra argument through the helpers. Addresses are plain 64-bit integers here because the kernel
// side is compiled as C++ for OpenCL, where a pointer has an address space.
#pragma once
#ifndef LILY_KERNEL_SIDE
#include <stdint.h>
#endif

#define LILY_REGION_BYTES (1ull << 27)
#define LILY_MAX_THREADGROUP_OBJECTS 64

// Values that the lanes of a simdgroup exchange: 32-bit word w of lane l is words[w][l], so that a
// reduction reads whole vectors. The last lane to arrive (the leader) stores a reduced value in result.
typedef struct LilyExchange {
  uint32_t words[4][32];
  uint32_t result[4];
  uint32_t mask;                       // lanes that take part
  uint32_t reserved[11];
} LilyExchange;

// Kernel code writes values to `in`; a rendezvous makes it `out`, from which everyone reads.
typedef struct LilySimdgroupHeader {
  uint64_t in, out;                    // LilyExchange *
} LilySimdgroupHeader;

typedef struct LilyWorkerHeader {              // at the base of the region
  uint64_t simdgroup;                  // LilySimdgroupHeader * of the running lane
  uint32_t lane;                       // thread_index_in_simdgroup of the running lane
  uint32_t simdgroup_index;
  uint64_t constants;                  // LilyConstantValue * of the dispatch
  uint64_t zeros;                      // readable zero bytes that stand for an unbound reference
  uint64_t threadgroup_object[LILY_MAX_THREADGROUP_OBJECTS];   // by declaration number; 0 = not yet placed
} LilyWorkerHeader;

typedef struct LilyBindingWords { uint64_t address, length; } LilyBindingWords;   // LilyBinding of engine.h

// What a lane sees when it starts.
#ifdef LILY_KERNEL_SIDE
typedef struct LilyThread LilyThread;
#endif
struct LilyThread {
  uint64_t buffers;                    // LilyBindingWords *
  uint64_t threadgroup_arguments;      // uint64_t addresses, one per [[threadgroup(n)]] index
  uint32_t group[3];                   // threadgroup_position_in_grid
  uint32_t position[3];                // thread_position_in_threadgroup
  uint32_t index;                      // thread_index_in_threadgroup
  uint32_t size[3];                    // threads_per_threadgroup of this group (ragged edge: smaller)
  uint32_t nominal[3];                 // dispatch_threads_per_threadgroup
  uint32_t grid[3];                    // threads_per_grid
  uint32_t groups[3];                  // threadgroups_per_grid
  uint32_t simdgroups;                 // simdgroups_per_threadgroup of this group
};

// Functions of the engine. `preserve_none`: the caller saves what it needs, so that switching lanes
// saves two registers instead of eight.
#define LILY_LANE_CALL __attribute__((preserve_none))
typedef LILY_LANE_CALL uint32_t (*LilyRendezvousFunction)(uint32_t site);        // 1 for the leader
#define LILY_BARRIER_SITE 0x80000000u
typedef uint64_t (*LilyThreadgroupFunction)(uint32_t number, uint64_t bytes, uint64_t align);
#define LILY_ACCESS_STORE 1u
#define LILY_ACCESS_PACKED 2u          // any alignment, any size: packed types, copies of structs
typedef void (*LilyAccessFunction)(uint64_t address, uint32_t bytes, uint32_t kind);
typedef void (*LilyFailFunction)(uint64_t message);
typedef float (*LilyMath1)(float);
typedef float (*LilyMath2)(float, float);

typedef struct LilyEngineTable {
  LilyRendezvousFunction rendezvous;   // waits for the other lanes of the simdgroup; with LILY_BARRIER_SITE: for
                                       // all threads of the threadgroup
  LilyThreadgroupFunction threadgroup; // places a threadgroup variable
  LilyAccessFunction access;           // strict modules: every load and store
  LilyFailFunction fail;
  LilyMath1 sin, cos, tan, asin, acos, atan, sinh, cosh, asinh, acosh, atanh;
  LilyMath2 pow, fmod, atan2, nextafter;
} LilyEngineTable;

// Size of a module's threadgroup variables: each declaration leaves a record of three 32-bit words in
// the section lily_threadgroup: distance from the record to the code that uses it, number, bytes.
