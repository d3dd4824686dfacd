// NVML: the few calls by which torch and nvidia-ml-py look at a card.
#include "card.h"
#include <stdio.h>

enum { OK = 0, INSUFFICIENT_SIZE = 7, NOT_SUPPORTED = 3 };
#define DEVICE(handle) ((int)(uintptr_t)(handle) - 1)

int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error ? "Not Supported" : "Success"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = card()->devices; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(uintptr_t)(index + 1); return OK; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
  unsigned domain, bus = 1;
  sscanf(id, "%x:%x", &domain, &bus);
  *handle = (void *)(uintptr_t)bus;  // that of a device is its number, off zero
  return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlSystemGetDriverVersion(char *version, unsigned room) { snprintf(version, room, "580.65.06"); return OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *handle, char *info) { info[28] = 0; return OK; }  // its state: not supported

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
  size_t used = card_used(DEVICE(handle)), total = card()->total_bytes;
  if (used > total) used = total;
  total_free_used[0] = total, total_free_used[1] = total - used, total_free_used[2] = used;
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct { unsigned version; unsigned long long total, reserved, free, used; } *m) {
  unsigned long long plain[3];
  nvmlDeviceGetMemoryInfo(handle, plain);
  m->total = plain[0], m->reserved = 0, m->free = plain[1], m->used = plain[2];
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *n, struct { unsigned pid; unsigned long long used; } *out) {
  unsigned pids[256], room = *n;
  unsigned long long used[256];
  *n = card_processes(DEVICE(handle), pids, used, 256);
  if (*n > room) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < *n; i++) out[i].pid = pids[i], out[i].used = used[i];
  return OK;
}
