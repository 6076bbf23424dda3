// A stand-in for libcuda.so.1 and libnvrtc.so without a GPU: memory is the CPU's, kernels do nothing, graphs are written down.
// FAKE_CUDA_DEVICES: number of GPUs (1). FAKE_CUDA_FAIL=function:code:first: from its first-th call on (counted from 0) the function
// returns code. FAKE_CUDA_LOG: file that launches and graph nodes are written to. FAKE_CUDA_CAPABILITY: major version (9).
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
typedef struct { void *function; unsigned grid[3], block[3], shared_bytes; void **parameters, **extra; void *kernel, *context; } Params;

static int fails(const char *name, int *calls) {
  const char *plan = getenv("FAKE_CUDA_FAIL");
  size_t length = strlen(name);
  int code = 0, first = 0;
  if (!plan || strncmp(plan, name, length) != 0 || plan[length] != ':') return 0;
  sscanf(plan + length + 1, "%d:%d", &code, &first);
  return (*calls)++ >= first ? code : 0;
}
#define START(name) static int calls; int failure = fails(#name, &calls); if (failure) return failure
static void note(const char *text) {
  const char *path = getenv("FAKE_CUDA_LOG");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s\n", text);
  fclose(file);
}
static int number(const char *name, int fallback) { return getenv(name) ? atoi(getenv(name)) : fallback; }

R cuInit(unsigned flags) { START(cuInit); return 0; }
R cuDriverGetVersion(int *version) { *version = 13000; return 0; }
R cuGetErrorName(R code, const char **text) {
  *text = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OTHER";
  return 0;
}
R cuGetErrorString(R code, const char **text) { *text = code == 700 ? "an illegal memory access was encountered" : "failed"; return 0; }
R cuDeviceGetCount(int *count) { *count = number("FAKE_CUDA_DEVICES", 1); return 0; }
R cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
R cuDeviceGetName(char *name, int length, int device) { snprintf(name, (size_t)length, "Fake GPU %d", device); return 0; }
R cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? number("FAKE_CUDA_CAPABILITY", 9) : 0; return 0; }
R cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)4 << 30; return 0; }
R cuDevicePrimaryCtxRetain(void **context, int device) { START(cuDevicePrimaryCtxRetain); *context = (void *)(uintptr_t)(device + 1); return 0; }
R cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
R cuCtxSetCurrent(void *context) { return 0; }
R cuMemGetInfo_v2(size_t *free, size_t *total) { *free = (size_t)3 << 30; *total = (size_t)4 << 30; return 0; }
R cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  START(cuMemAlloc_v2);
  *address = (uint64_t)(uintptr_t)aligned_alloc(512, (bytes + 511) / 512 * 512);
  return 0;
}
R cuMemFree_v2(uint64_t address) { free((void *)(uintptr_t)address); return 0; }
R cuMemHostAlloc(void **address, size_t bytes, unsigned flags) { START(cuMemHostAlloc); *address = aligned_alloc(512, (bytes + 511) / 512 * 512); return 0; }
R cuMemFreeHost(void *address) { free(address); return 0; }
R cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) { return 0; }
R cuMemHostUnregister(void *address) { return 0; }
R cuMemcpy(uint64_t to, uint64_t from, size_t bytes) { memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes); return 0; }
R cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) { START(cuMemcpyAsync); return cuMemcpy(to, from, bytes); }
R cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { memcpy(to, (void *)(uintptr_t)from, bytes); return 0; }
R cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { memcpy((void *)(uintptr_t)to, from, bytes); return 0; }
R cuMemsetD8_v2(uint64_t to, unsigned char value, size_t bytes) { memset((void *)(uintptr_t)to, value, bytes); return 0; }
R cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) { return cuMemsetD8_v2(to, value, bytes); }
R cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return 0; }
R cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
R cuStreamSynchronize(void *stream) { return 0; }
R cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return 0; }
R cuEventDestroy_v2(void *event) { free(event); return 0; }
R cuEventRecord(void *event, void *stream) { return 0; }
R cuEventQuery(void *event) { START(cuEventQuery); return 0; }
R cuEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 0.5f; return 0; }
R cuModuleLoadData(void **module, const void *image) { START(cuModuleLoadData); *module = malloc(1); return 0; }
R cuModuleUnload(void *module) { free(module); return 0; }
R cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
R cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
R cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                 void **parameters, void **extra) {
  char text[256];
  START(cuLaunchKernel);
  snprintf(text, sizeof text, "single %s grid %u %u %u block %u %u %u shared %u", (char *)function, gx, gy, gz, bx, by, bz, shared);
  note(text);
  return 0;
}

static uintptr_t nodes;
R cuGraphCreate(void **graph, unsigned flags) { *graph = malloc(1); nodes = 0; note("graph"); return 0; }
R cuGraphDestroy(void *graph) { free(graph); return 0; }
static void node(const char *what, void **out, void **after, size_t count) {
  char text[4096];
  int at = snprintf(text, sizeof text, "node %lu %s after", (unsigned long)++nodes, what);
  *out = (void *)nodes;
  for (size_t i = 0; i < count; i++) at += snprintf(text + at, sizeof text - (size_t)at, " %lu", (unsigned long)(uintptr_t)after[i]);
  note(text);
}
R cuGraphAddKernelNode_v2(void **out, void *graph, void **after, size_t count, const Params *p) {
  START(cuGraphAddKernelNode_v2);
  node((char *)p->function, out, after, count);
  return 0;
}
R cuGraphAddEmptyNode(void **out, void *graph, void **after, size_t count) { node("empty", out, after, count); return 0; }
R cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { START(cuGraphInstantiateWithFlags); *exec = malloc(1); note("instantiate"); return 0; }
R cuGraphExecKernelNodeSetParams_v2(void *exec, void *one, const Params *p) {
  char text[256];
  snprintf(text, sizeof text, "update %lu %s", (unsigned long)(uintptr_t)one, (char *)p->function);
  note(text);
  return 0;
}
R cuGraphExecDestroy(void *exec) { free(exec); return 0; }
R cuGraphLaunch(void *exec, void *stream) { START(cuGraphLaunch); note("launch"); return 0; }

// ---- NVRTC: "compiles" anything, and notes the options
const char *nvrtcGetErrorString(R code) { return "NVRTC_ERROR_COMPILATION"; }
R nvrtcCreateProgram(void **program, const char *text, const char *name, int count, const char *const *headers, const char *const *names) { *program = malloc(1); return 0; }
R nvrtcDestroyProgram(void **program) { free(*program); return 0; }
R nvrtcCompileProgram(void *program, int count, const char *const *options) {
  char text[4096] = "compile";
  START(nvrtcCompileProgram);
  for (int i = 0; i < count; i++) { strcat(text, " "); strcat(text, options[i]); }
  note(text);
  return 0;
}
R nvrtcGetProgramLogSize(void *program, size_t *size) { *size = 15; return 0; }
R nvrtcGetProgramLog(void *program, char *log) { strcpy(log, "kernel.cu(1): x"); return 0; }
R nvrtcGetCUBINSize(void *program, size_t *size) { *size = 4; return 0; }
R nvrtcGetCUBIN(void *program, char *code) { memcpy(code, "code", 4); return 0; }
