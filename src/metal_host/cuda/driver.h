// The part of the CUDA driver interface that the device uses, found with dlopen: no CUDA header and no toolkit is needed.
// Names, types and values are those of NVIDIA's driver API documentation.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <string>

namespace lily::cuda {

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphNode_st* CUgraphNode;
typedef struct CUgraphExec_st* CUgraphExec;

struct KernelNodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2
  CUfunction function;
  unsigned grid[3], block[3], shared_bytes;
  void** parameters;
  void** extra;
  void* kernel;
  CUcontext context;
};

enum : CUresult { kSuccess = 0, kOutOfMemory = 2, kNotReady = 600 };
enum { kComputeMajor = 75, kComputeMinor = 76 };                       // CUdevice_attribute
enum { kMaxThreadsPerBlock = 0, kSharedSizeBytes = 1 };                // CUfunction_attribute
enum { kHostPortable = 1, kHostDeviceMap = 2, kStreamNonBlocking = 1 };

#define LILY_CUDA_FUNCTIONS(X)                                                                                        \
  X(cuInit, (unsigned flags))                                                                                         \
  X(cuDriverGetVersion, (int* version))                                                                               \
  X(cuGetErrorName, (CUresult code, const char** text))                                                               \
  X(cuGetErrorString, (CUresult code, const char** text))                                                             \
  X(cuDeviceGetCount, (int* count))                                                                                   \
  X(cuDeviceGet, (CUdevice * device, int ordinal))                                                                    \
  X(cuDeviceGetName, (char* name, int length, CUdevice device))                                                       \
  X(cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))                                               \
  X(cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device))                                                           \
  X(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                                                 \
  X(cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                                                  \
  X(cuCtxSetCurrent, (CUcontext context))                                                                             \
  X(cuMemGetInfo_v2, (size_t * free, size_t * total))                                                                 \
  X(cuMemAlloc_v2, (CUdeviceptr * address, size_t bytes))                                                             \
  X(cuMemFree_v2, (CUdeviceptr address))                                                                              \
  X(cuMemHostAlloc, (void** address, size_t bytes, unsigned flags))                                                   \
  X(cuMemFreeHost, (void* address))                                                                                   \
  X(cuMemHostRegister_v2, (void* address, size_t bytes, unsigned flags))                                              \
  X(cuMemHostUnregister, (void* address))                                                                             \
  X(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes))                                                       \
  X(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                                 \
  X(cuMemcpyDtoH_v2, (void* to, CUdeviceptr from, size_t bytes))                                                      \
  X(cuMemcpyHtoD_v2, (CUdeviceptr to, const void* from, size_t bytes))                                                \
  X(cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t bytes))                                               \
  X(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                            \
  X(cuStreamCreate, (CUstream * stream, unsigned flags))                                                              \
  X(cuStreamDestroy_v2, (CUstream stream))                                                                            \
  X(cuStreamSynchronize, (CUstream stream))                                                                           \
  X(cuEventCreate, (CUevent * event, unsigned flags))                                                                 \
  X(cuEventDestroy_v2, (CUevent event))                                                                               \
  X(cuEventRecord, (CUevent event, CUstream stream))                                                                  \
  X(cuEventQuery, (CUevent event))                                                                                    \
  X(cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end))                                            \
  X(cuModuleLoadData, (CUmodule * module, const void* image))                                                         \
  X(cuModuleUnload, (CUmodule module))                                                                                \
  X(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))                                  \
  X(cuFuncGetAttribute, (int* value, int attribute, CUfunction function))                                             \
  X(cuLaunchKernel, (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes, \
                     CUstream stream, void** parameters, void** extra))                                               \
  X(cuGraphCreate, (CUgraph * graph, unsigned flags))                                                                 \
  X(cuGraphDestroy, (CUgraph graph))                                                                                  \
  X(cuGraphAddKernelNode_v2, (CUgraphNode * node, CUgraph graph, const CUgraphNode* after, size_t count, const KernelNodeParams* params)) \
  X(cuGraphAddEmptyNode, (CUgraphNode * node, CUgraph graph, const CUgraphNode* after, size_t count))                 \
  X(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags))                       \
  X(cuGraphExecKernelNodeSetParams_v2, (CUgraphExec exec, CUgraphNode node, const KernelNodeParams* params))          \
  X(cuGraphExecDestroy, (CUgraphExec exec))                                                                           \
  X(cuGraphLaunch, (CUgraphExec exec, CUstream stream))

struct Driver {
  std::string problem;  // why there is no driver; empty when there is one
  int version = 0;      // of CUDA, 13000 for 13.0
#define X(name, parameters) CUresult(*name) parameters = nullptr;
  LILY_CUDA_FUNCTIONS(X)
#undef X
  std::string describe(CUresult code) const;  // "CUDA_ERROR_NAME: what it means"
};

// Loaded and initialised on first use. LILY_METAL_HOST=cuda_driver=PATH names another library.
const Driver& driver();

}  // namespace lily::cuda
