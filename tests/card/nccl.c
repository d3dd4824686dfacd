// NCCL whose collectives do nothing: every process keeps what it has.
#include "card.h"
#include <string.h>

enum { OK = 0 };
static int only;  // what every communicator is

extern int cudaMalloc(void **at, size_t bytes), cudaFree(void *at);
typedef struct { char bytes[128]; } Id;

int ncclGetVersion(int *version) { *version = 22907; return OK; }
int ncclGetUniqueId(Id *id) { memset(id, 1, sizeof *id); return OK; }
int ncclCommInitRank(void **comm, int n, Id id, int rank) { *comm = &only; return OK; }
int ncclCommInitRankConfig(void **comm, int n, Id id, int rank, void *config) { *comm = &only; return OK; }
int ncclCommInitRankScalable(void **comm, int n, int rank, int ids, Id *id, void *config) { *comm = &only; return OK; }
int ncclCommSplit(void *comm, int color, int key, void **out, void *config) { *out = &only; return OK; }
int ncclCommDestroy(void *comm) { return OK; }
int ncclCommAbort(void *comm) { return OK; }
int ncclCommFinalize(void *comm) { return OK; }
int ncclCommGetAsyncError(void *comm, int *error) { *error = OK; return OK; }
int ncclCommCuDevice(void *comm, int *device) { *device = card_current; return OK; }
int ncclGroupStart(void) { return OK; }
int ncclGroupEnd(void) { return OK; }
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
  card_launched("ncclAllReduce", NULL);
  return OK;
}
int ncclBcast(void *at, size_t n, int type, int root, void *comm, void *stream) {
  card_launched("ncclBcast", NULL);
  return OK;
}
int ncclAllGather(const void *from, void *to, size_t n, int type, void *comm, void *stream) {
  card_launched("ncclAllGather", NULL);
  return OK;
}
int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
  card_launched("ncclReduceScatter", NULL);
  return OK;
}
const char *ncclGetErrorString(int error) { return "an error of the card without a GPU"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclMemAlloc(void **at, size_t bytes) { return cudaMalloc(at, bytes); }
int ncclMemFree(void *at) { return cudaFree(at); }
