// The CUDA runtime API.
#define _GNU_SOURCE
#include "card.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define OK return cudaSuccess
#define VERSION 13000

static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess"
       : error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
       : error == cudaErrorInsufficientDriver ? "cudaErrorInsufficientDriver"
       : error == cudaErrorNoDevice ? "cudaErrorNoDevice"
       : error == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice" : "cudaErrorUnknown";
}
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error"
       : error == cudaErrorMemoryAllocation ? "out of memory"
       : error == cudaErrorInsufficientDriver ? "CUDA driver version is insufficient for CUDA runtime version"
       : error == cudaErrorNoDevice ? "no CUDA-capable device is detected"
       : error == cudaErrorInvalidDevice ? "invalid device ordinal"
       : error == cudaErrorNotSupported ? "operation not supported" : "an error of the card without a GPU";
}

// ---------------------------------------------------------------- devices

cudaError_t cudaGetDeviceCount(int *n) {
  *n = card()->devices;
  if (card()->driver < VERSION) return fail(cudaErrorInsufficientDriver);
  return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { *device = card_current; OK; }
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= card()->devices) return fail(cudaErrorInvalidDevice);
  card_enter(card_current = device);
  OK;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = card()->driver; OK; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = VERSION; OK; }
cudaError_t cudaDeviceSynchronize(void) { card_waited("cudaDeviceSynchronize"); OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { card_waited("cudaStreamSynchronize"); OK; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { card_waited("cudaEventSynchronize"); OK; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  OK;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int room, int device) {
  snprintf(id, room, "0000:%02x:00.0", device + 1);
  OK;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; OK; }

// What a card of the consumer class says of itself; what is not listed is 0.
int card_attribute(int attribute) {
  int is_consumer = card()->major * 10 + card()->minor != 80 && card()->major != 9;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return card()->major < 8 ? 64 << 10 : is_consumer ? 99 << 10 : card()->major == 8 ? 163 << 10 : 227 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return card()->major < 8 ? 64 << 10 : is_consumer ? 100 << 10 : card()->major == 8 ? 164 << 10 : 228 << 10;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return card()->major < 8 ? 0 : 1024;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 2475000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 10501000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 192;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 36 << 20;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return card()->processors;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return card()->major < 8 ? 1024 : is_consumer ? 1536 : 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 16;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 1;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return card()->major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return card()->minor;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
    default: return 0;
  }
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = card_attribute(attribute);  // both APIs number them alike
  OK;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  if (device < 0 || device >= card()->devices) return fail(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", card()->name);
  memset(p->uuid.bytes, 0x40 + device, sizeof p->uuid.bytes);
  p->totalGlobalMem = card()->total_bytes;
  p->major = card()->major, p->minor = card()->minor;
  p->multiProcessorCount = card()->processors;
  p->pciBusID = device + 1;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = p->maxThreadsPerBlock = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->totalConstMem = 64 << 10;
  p->textureAlignment = 512, p->texturePitchAlignment = 32;
  p->asyncEngineCount = 2;
  p->memoryBusWidth = card_attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
  p->l2CacheSize = card_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  p->sharedMemPerBlock = card_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK);
  p->sharedMemPerBlockOptin = card_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  p->sharedMemPerMultiprocessor = card_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  p->reservedSharedMemPerBlock = card_attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  p->maxThreadsPerMultiProcessor = card_attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  p->maxBlocksPerMultiProcessor = card_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = p->cooperativeLaunch = 1;
  p->managedMemory = p->concurrentManagedAccess = p->memoryPoolsSupported = 1;
  OK;
}

// ---------------------------------------------------------------- memory

cudaError_t cudaMalloc(void **at, size_t bytes) {
  *at = bytes ? card_alloc(card_current, bytes) : NULL;
  return *at || !bytes ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *at) { return !at || card_free(at) ? cudaSuccess : fail(cudaErrorInvalidValue); }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  card_enter(card_current);
  size_t used = card_used(card_current);
  *total_bytes = card()->total_bytes;
  *free_bytes = used < *total_bytes ? *total_bytes - used : 0;
  OK;
}
cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned flags) {
  return posix_memalign(at, 4096, bytes ? bytes : 1) ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaMallocHost(void **at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
cudaError_t cudaFreeHost(void *at) { free(at); OK; }
cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned flags) { OK; }
cudaError_t cudaHostUnregister(void *at) { OK; }
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; OK; }

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
  memmove(to, from, bytes);
  int was_on_card = card_device_of(from) >= 0, is_on_card = card_device_of(to) >= 0;
  if (is_on_card && !was_on_card) card_sent(to);
  if (was_on_card && !is_on_card) card_read_back(to, from, bytes);
  OK;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  card_waited("cudaMemcpy");
  return cudaMemcpyAsync(to, from, bytes, kind, 0);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t bytes, cudaStream_t s) {
  memmove(to, from, bytes);
  OK;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t s) {
  for (size_t row = 0; row < height; row++)
    memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  OK;
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset, enum cudaMemcpyKind k) {
  memcpy((char *)symbol + offset, from, bytes);
  OK;
}
cudaError_t cudaGetSymbolAddress(void **at, const void *symbol) { *at = (void *)symbol; OK; }

static void fill(void *at, int value, size_t bytes) {
  uintptr_t from = ((uintptr_t)at + 4095) & ~4095ul, to = ((uintptr_t)at + bytes) & ~4095ul;
  int is_worth_it = !value && bytes >= MIB && card_device_of(at) >= 0;
  if (is_worth_it && !madvise((void *)from, to - from, MADV_DONTNEED)) {  // zero pages cost no memory
    memset(at, 0, from - (uintptr_t)at);
    memset((void *)to, 0, (uintptr_t)at + bytes - to);
  } else {
    memset(at, value, bytes);
  }
}
cudaError_t cudaMemset(void *at, int value, size_t bytes) { fill(at, value, bytes); OK; }
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t s) { fill(at, value, bytes); OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
  int device = card_device_of(at);
  memset(a, 0, sizeof *a);
  a->type = device >= 0 ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->device = device >= 0 ? device : 0;
  a->devicePointer = a->hostPointer = (void *)at;
  OK;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at) { return fail(cudaErrorNotSupported); }

// ---------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) { *s = card_handle(); OK; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { *s = card_handle(); OK; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = card_handle(); OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *n) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (n) *n = 0;
  OK;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) { return fail(cudaErrorNotSupported); }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  *mode = cudaStreamCaptureModeGlobal;
  OK;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned flags) {
  call(s, cudaSuccess, data);
  OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) { call(data); OK; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(struct timespec));
  OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned flags) {
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
  OK;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { return cudaEventRecordWithFlags(event, s, 0); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  struct timespec *a = (struct timespec *)from, *b = (struct timespec *)to;
  *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) * 1e-6;
  if (*ms < 0.001f) *ms = 0.001f;  // autotuning divides by it
  OK;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) { *pool = card_handle(); OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  *(uint64_t *)value = 0;
  OK;
}

// ---------------------------------------------------------------- kernels

void **__cudaRegisterFatBinary(void *binary) { static void *handle[1]; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t n, int c, int g) {}
void __cudaRegisterFunction(void **handle, const char *host, char *function, const char *name, int limit, void *t,
                            void *b, void *bd, void *gd, int *w) {
  card_name_kernel(host, name);
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed[16];
static __thread int n_pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  if (n_pushed == 16) return 1;
  pushed[n_pushed].grid = grid, pushed[n_pushed].block = block;
  pushed[n_pushed].shared = shared, pushed[n_pushed++].stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (!n_pushed) return fail(cudaErrorMissingConfiguration);
  n_pushed--;
  *grid = pushed[n_pushed].grid, *block = pushed[n_pushed].block;
  *shared = pushed[n_pushed].shared, *(void **)stream = pushed[n_pushed].stream;
  OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; OK; }
static cudaError_t launch(const void *function) { card_launched(NULL, function); OK; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launch(k); }
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { return launch(f); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) {
  return launch(f);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { return launch(f); }

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
  // CUB wants to hear of an architecture that torch's kernels were built for.
  static const int built[] = {75, 80, 86, 90, 100, 120};
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32;
  a->maxDynamicSharedSizeBytes = card_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  for (size_t i = 0; i < sizeof built / sizeof *built; i++)
    if (built[i] <= card()->major * 10 + card()->minor) a->ptxVersion = a->binaryVersion = built[i];
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *function, int threads, size_t shared) {
  int most = card_attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR);
  *n = threads > 0 && threads < most ? most / threads : 1;
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, function, threads, shared);
}
