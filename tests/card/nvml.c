// NVML: the few calls by which torch and nvidia-ml-py look at a card.
#include "card.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };
#define DEVICE(handle) ((int)(uintptr_t)(handle) - 1)

// $CARD_NVML_ERROR is what nvmlInit refuses with or, after the beginning of its name, another call.
static int error_of(const char *call) {
  const char *set = getenv("CARD_NVML_ERROR") ?: "", *colon = strchr(set, ':');
  if (colon) return strncmp(call, set, colon - set) ? OK : atoi(colon + 1);
  return strncmp(call, "nvmlInit", 8) ? OK : atoi(set);
}
int nvmlInit_v2(void) { return error_of(__func__); }
int nvmlInitWithFlags(unsigned flags) { return error_of(__func__); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error ? "Not Supported" : "Success"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = card()->plugged; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(uintptr_t)(index + 1); return error_of(__func__); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
  unsigned domain, bus = 1;
  sscanf(id, "%x:%x", &domain, &bus);
  *handle = (void *)(uintptr_t)bus;  // that of a device is its number, off zero
  return OK;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = card()->driver; return error_of(__func__); }
int nvmlSystemGetDriverVersion(char *version, unsigned room) { snprintf(version, room, "580.65.06"); return OK; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *type) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *info) { return NOT_SUPPORTED; }
int nvmlDeviceGetGpuFabricInfoV(void *handle, char *info) { info[28] = 0; return OK; }  // its state: not supported

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
  size_t used = card_used(DEVICE(handle)), total = card()->total_bytes;
  if (used > total) used = total;
  total_free_used[0] = total, total_free_used[1] = total - used, total_free_used[2] = used;
  return error_of(__func__);
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct { unsigned version; unsigned long long total, reserved, free, used; } *m) {
  unsigned long long plain[3];
  nvmlDeviceGetMemoryInfo(handle, plain);
  m->total = plain[0], m->reserved = 0, m->free = plain[1], m->used = plain[2];
  return OK;
}
struct use { unsigned pid; unsigned long long used; };
struct use_v3 { unsigned pid; unsigned long long used; unsigned instance, compute_instance; };
static int processes(void *handle, unsigned *n, struct use *out, struct use_v3 *out_v3) {
  unsigned pids[256], room = *n;
  unsigned long long used[256];
  *n = card_processes(DEVICE(handle), pids, used, 256);
  if (*n > room) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < *n; i++)
    if (out) out[i] = (struct use){pids[i], used[i]};
    else out_v3[i] = (struct use_v3){pids[i], used[i]};
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *n, struct use *out) { return processes(handle, n, out, 0); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *n, struct use_v3 *out) { return processes(handle, n, 0, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *n, struct use_v3 *out) { return NOT_SUPPORTED; }
int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned room) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/comm", pid);
  FILE *file = fopen(path, "r");
  if (!file) return NOT_FOUND;
  int n = fscanf(file, "%63s", path);
  fclose(file);
  snprintf(name, room, "%s%s", "/usr/bin/", n == 1 ? path : "");
  return OK;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned room) { snprintf(name, room, "%s", card()->name); return OK; }
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) { *milliwatts = 200000; return OK; }
int nvmlDeviceGetPciInfo_v3(void *handle, struct { char legacy[16]; unsigned domain, bus, device; } *place) {
  place->domain = place->device = 0, place->bus = DEVICE(handle) + 1;
  return OK;
}
