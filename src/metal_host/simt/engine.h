// C interface of the SIMT engine, which runs compiled Metal kernels on CPU cores.
// Two sides use it: the host (software Metal) opens kernel modules and runs dispatches; each module
// (built by frontend/build_kernels.py) describes its kernels with the structs of the second half.
#pragma once
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

#define LILY_ENGINE_ABI 1u
#define LILY_MAX_BUFFERS 31
#define LILY_SIMD_WIDTH 32
#define LILY_MAX_THREADS 1024
#define LILY_THREADGROUP_LIMIT 32768u      // bytes, the least that every Apple GPU offers

// ------------------------------------------------------------------------------------------------
// What a kernel module says about itself. The module exports one symbol:
//   extern const LilyKernelModule lily_kernel_module;

typedef enum LilyParameterKind { LILY_PARAMETER_BUFFER = 0, LILY_PARAMETER_THREADGROUP = 1 } LilyParameterKind;
typedef enum LilyAddressSpace { LILY_SPACE_DEVICE = 0, LILY_SPACE_CONSTANT = 1, LILY_SPACE_THREADGROUP = 2 } LilyAddressSpace;

typedef struct LilyParameter {             // one [[buffer(i)]] or [[threadgroup(i)]] argument
  const char *name;
  uint32_t kind, index, space;
  uint32_t writable;                       // 0: pointer or reference to const, or constant address space
  uint32_t element_size, element_align;    // of the pointee: what a binding's offset must be a multiple of
} LilyParameter;

typedef struct LilyFunctionConstant {
  const char *name, *type;                 // MSL type: "bool", "uint", "int", "float", "ushort", "half", "uint4" …
  uint32_t index, size;                    // [[function_constant(index)]]; size in bytes
  uint32_t required;                       // 0: the source asks is_function_constant_defined, so it may stay unset
} LilyFunctionConstant;

typedef struct LilyThread LilyThread;
typedef __attribute__((preserve_none)) void (*LilyEntryFunction)(const LilyThread *thread);   // called by the engine only

typedef struct LilyKernelEntry {
  const char *name;                        // host_name or function name
  LilyEntryFunction function;
  uint32_t max_threads;                    // [[max_total_threads_per_threadgroup(n)]] or 0
  uint32_t line;                           // of the kernel in its .metal file
  const LilyParameter *parameters;
  uint32_t parameter_count;
  uint32_t reserved;
} LilyKernelEntry;

struct LilyEngineTable;                    // engine functions that kernel code calls (see kernel_abi.h)

typedef struct LilyKernelModule {
  uint32_t abi;                            // LILY_ENGINE_ABI
  uint32_t strict;                         // 1: loads and stores call the engine
  const char *source;                      // file name for messages, for example "gemv.metal"
  const LilyKernelEntry *entries;
  uint32_t entry_count, constant_count;
  const LilyFunctionConstant *constants;   // order = order of LilyDispatch.constants
  struct LilyEngineTable *table;           // filled by lily_simt_open
  const int32_t *threadgroup_records, *threadgroup_records_end;   // see kernel_abi.h
} LilyKernelModule;

// ------------------------------------------------------------------------------------------------
// Host side.

typedef struct LilyModule LilyModule;      // an opened module

// Opens a module (dlopen, RTLD_LOCAL) and connects it to the engine. NULL and a message on failure.
LilyModule *lily_simt_open(const char *path, char *error, size_t error_size);
void lily_simt_close(LilyModule *module);
const LilyKernelModule *lily_simt_describe(const LilyModule *module);
int lily_simt_find(const LilyModule *module, const char *name);             // entry index, or -1
uint32_t lily_simt_static_threadgroup_bytes(const LilyModule *module, uint32_t entry);

typedef struct LilyBinding {
  void *address;                           // NULL: nothing bound
  uint64_t length;                         // bytes from address to the end of the buffer (bounds of strict runs)
} LilyBinding;

// Value of one function constant, in the order of LilyKernelModule.constants.
typedef struct LilyConstantValue {
  unsigned char value[16];
  uint32_t defined;
  uint32_t reserved[3];
} LilyConstantValue;

typedef struct LilyDispatch {
  const LilyModule *module;
  uint32_t entry;
  uint32_t groups[3];                      // threadgroups in the grid; 0 anywhere = nothing to do
  uint32_t threads[3];                     // threads per threadgroup (nominal)
  uint32_t grid[3];                        // threads in the grid; dispatchThreads may clip the last groups;
                                           // dispatchThreadgroups: groups * threads
  const LilyConstantValue *constants;      // NULL when the module has none
  uint32_t threadgroup_bytes[LILY_MAX_BUFFERS];   // setThreadgroupMemoryLength:atIndex:
  LilyBinding buffers[LILY_MAX_BUFFERS];
} LilyDispatch;

enum { LILY_ORDER_FORWARD = 0, LILY_ORDER_REVERSE = 1, LILY_ORDER_RANDOM = 2 };
enum {
  LILY_STRICT_OFF = 0,                     // what hardware lets pass passes
  LILY_STRICT_BARRIERS = 1,                // default: divergent threadgroup_barrier is an error
  LILY_STRICT_SIMD = 2,                    // also: simd operations reached by only some live lanes
};

// One byte range [start, end) that a dispatch (by its place in the call) read, or wrote when `store` is 1.
typedef void (*LilyAccessReport)(void *context, uint32_t dispatch, uint32_t store, uint64_t start, uint64_t end);

typedef struct LilyOptions {
  uint32_t workers;                        // 0 = all cores
  uint32_t order;                          // LILY_ORDER_*: lanes, simdgroups, threadgroups, dispatches of one call
  uint32_t strict;                         // LILY_STRICT_*
  uint32_t poison;                         // 1: threadgroup memory starts as NaN in every threadgroup
  uint64_t seed;                           // of LILY_ORDER_RANDOM
  uint32_t threadgroup_limit;              // bytes, 0 = LILY_THREADGROUP_LIMIT
  uint32_t reserved;
  LilyAccessReport report;                 // NULL, or: called on the caller's thread when a run has ended (also a failed
  void *report_context;                    // one), by dispatch, reads before writes, ascending. Strict modules only.
} LilyOptions;

typedef struct LilyStats {
  uint64_t threadgroups, threads;
  uint64_t simd_operations, barriers, divergent;
  uint64_t threadgroup_peak;               // bytes of threadgroup memory used by one group, at most
} LilyStats;

// Runs `count` dispatches that no barrier orders among themselves, and returns when all are done: 0, or
// 1 and a message that names kernel, threadgroup and thread. options and stats may be NULL. May be called
// from several threads; calls run one after the other. A persistent pool of workers helps the caller.
int lily_simt_run(const LilyDispatch *dispatches, uint32_t count, const LilyOptions *options, LilyStats *stats,
                  char *error, size_t error_size);

uint32_t lily_simt_cores(void);                       // cores that this process may use
int lily_simt_cpu_has(const char *target);            // can this CPU run "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16"?
void lily_simt_shutdown(void);                        // joins the pool (it restarts on the next run); for unload

#ifdef __cplusplus
}
#endif
