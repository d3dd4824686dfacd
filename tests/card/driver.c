// The CUDA driver API, which Triton and expandable segments use.
#define _GNU_SOURCE
#include "card.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE (2 * MIB)

extern int card_attribute(int attribute);

static void *find(const char *symbol) {
  char name[200];
  snprintf(name, sizeof name, "%s_v2", symbol);  // the newer of two
  void *found = dlsym(RTLD_DEFAULT, name);
  if (!found) found = dlsym(RTLD_DEFAULT, symbol);
  if (!found) card_unknown("missing", symbol);
  return found;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
  *function = find(symbol);
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *status) {
  *function = find(symbol);
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuInit(unsigned flags) { return card()->devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDriverGetVersion(int *version) { return (CUresult)cudaDriverGetVersion(version); }
CUresult cuDeviceGet(CUdevice *device, int i) { *device = i; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *n) { *n = card()->devices; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
  snprintf(name, room, "%s", card()->name);
  return CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) { *bytes = card()->total_bytes; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = card_attribute(attribute);
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return (CUresult)cudaMemGetInfo(free_bytes, total); }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_SUCCESS ? "no error" : error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "driver error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char **name) {
  *name = error == CUDA_SUCCESS ? "CUDA_SUCCESS"
        : error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

// A context is its device's number, off zero.
static CUcontext context(int device) { return (CUcontext)(uintptr_t)(0x100 + device); }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = context(card_current); return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) {
  if (c) card_current = (uintptr_t)c - 0x100;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) { *device = card_current; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device) { *c = context(device); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0, *active = card_entered(device);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = MIB; return CUDA_SUCCESS; }

// ---------------------------------------------------------------- kernels that Triton made

CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = card_handle(); return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, image);
}
CUresult cuModuleLoad(CUmodule *module, const char *path) {
  *module = card_handle();
  return access(path, R_OK) ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);  // a function is its name, for the trace
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
         : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32
         : attribute == CU_FUNC_ATTRIBUTE_BINARY_VERSION || attribute == CU_FUNC_ATTRIBUTE_PTX_VERSION
             ? card()->major * 10 + card()->minor : 0;
  return CUDA_SUCCESS;
}
static CUresult launch(CUfunction function) {
  card_launched((const char *)function, NULL);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream s, void **args, void **extra) { return launch(f); }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **extra) { return launch(f); }
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream s, void **args) { return launch(f); }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int threads, size_t shared) {
  return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, threads, shared);
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr at) {
  int device = card_device_of((void *)at);
  if (device < 0) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = at; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = CU_MEMORYTYPE_DEVICE; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = device; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = context(device); break;
    default: *(unsigned *)out = 0;
  }
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t n, CUstream s) {
  for (size_t i = 0; i < n; i++) ((unsigned *)at)[i] = value;
  return CUDA_SUCCESS;
}

// ---------------------------------------------------------------- expandable segments: memory and addresses apart

struct physical { size_t bytes; int device; };

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *p,
                                       CUmemAllocationGranularity_flags flags) { *bytes = PAGE; return CUDA_SUCCESS; }
CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  *at = (CUdeviceptr)card_reserve(card_current, bytes);
  return *at ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  return munmap((void *)at, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *p,
                     unsigned long long flags) {
  if (!card_take(p->location.id, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  struct physical *memory = malloc(sizeof *memory);
  *memory = (struct physical){bytes, p->location.id};
  *handle = (CUmemGenericAllocationHandle)memory;
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  struct physical *memory = (struct physical *)handle;
  card_give_back(memory->device, memory->bytes);
  free(memory);
  return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  return mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t n) { return CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  madvise((void *)at, bytes, MADV_DONTNEED);
  return mprotect((void *)at, bytes, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
