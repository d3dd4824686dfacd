// The books of the card: settings, memory, launches, and what other programs do meanwhile.
#define _GNU_SOURCE
#include "card.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE (2 * MIB)           // a card's memory is given out in such pages
#define ROUND(n) (((n) + PAGE - 1) / PAGE * PAGE)
#define ARENA ((size_t)4 << 40)  // addresses of a device; never given out twice
#define FIRST ((uintptr_t)0x200000000000)

__thread int card_current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---------------------------------------------------------------- settings

static struct card the_card;
static size_t context_bytes;
static FILE *trace_file;
static int is_told_scalar, is_disturbed, traces_waits;

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

static size_t mib_setting(const char *name, const char *otherwise) {
  return strtoull(setting(name, otherwise), 0, 10) * MIB;
}

static int count_visible(int devices) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return devices;
  int listed = 0;
  for (const char *c = visible; *c && *c != '-'; c++) listed += c == visible || c[-1] == ',';
  return listed < devices ? listed : devices;
}

// Whether $CARD_SCRIPT, which only one program shall meet, is about this one.
static int is_the_script(void) {
  const char *wanted = setting("CARD_SCRIPT", "");
  char words[4096] = {0};
  int file = open("/proc/self/cmdline", O_RDONLY);
  ssize_t n = file < 0 ? 0 : read(file, words, sizeof words - 1);
  if (file >= 0) close(file);
  for (ssize_t i = 0; i + 1 < n; i++)
    if (!words[i]) words[i] = ' ';
  return strstr(words, wanted) != NULL;
}

// ---------------------------------------------------------------- what processes know of each other

// The file $CARD_STATE, which harness.py reads as well. A process keeps its row when it has ended.
#define MOST_PROCESSES 4096
struct process {
  int32_t pid, is_gone;
  int64_t launches;
  uint64_t used[MOST_DEVICES], peak[MOST_DEVICES];
};
struct state {
  uint64_t others[MOST_DEVICES];  // what other programs use
  int64_t count;
  struct process processes[MOST_PROCESSES];
};
static struct state *state, own_state;
static struct process *mine;
static char entered[MOST_DEVICES];

static void open_state(void) {
  state = &own_state;
  const char *path = getenv("CARD_STATE");
  int file = path && *path ? open(path, O_RDWR | O_CREAT, 0666) : -1;
  if (file >= 0 && !ftruncate(file, sizeof *state)) {
    void *at = mmap(0, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at != MAP_FAILED) state = at;
  }
  if (file >= 0) close(file);
}

static void join(void) {  // also after a fork: a child is another process
  if (mine && mine->pid == getpid()) return;
  int64_t row = __sync_fetch_and_add(&state->count, 1);
  if (row >= MOST_PROCESSES) {
    fprintf(stderr, "card: more than %d processes\n", MOST_PROCESSES);
    abort();
  }
  mine = &state->processes[row];
  mine->pid = getpid();
}

static void settle(void) {
  the_card.plugged = atoi(setting("CARD_DEVICES", "1"));
  if (the_card.plugged > MOST_DEVICES) the_card.plugged = MOST_DEVICES;
  the_card.devices = count_visible(the_card.plugged);
  sscanf(setting("CARD_CAPABILITY", "8.9"), "%d.%d", &the_card.major, &the_card.minor);
  the_card.processors = atoi(setting("CARD_PROCESSORS", "46"));
  the_card.total_bytes = mib_setting("CARD_MEMORY_MIB", "12282");
  the_card.driver = atoi(setting("CARD_DRIVER", "13000"));
  snprintf(the_card.name, sizeof the_card.name, "%s", setting("CARD_NAME", "NVIDIA GeForce RTX 4070"));
  context_bytes = mib_setting("CARD_CONTEXT_MIB", "0");
  is_told_scalar = getenv("CARD_SCALARS") != NULL;
  traces_waits = getenv("CARD_TRACE_WAITS") != NULL;
  is_disturbed = getenv("CARD_OTHERS_AFTER") && is_the_script();
  int is_first = !strcmp(setting("LOCAL_RANK", "0"), "0");  // of those that torchrun starts
  if (getenv("CARD_TRACE") && is_first && is_the_script()) trace_file = fopen(getenv("CARD_TRACE"), "a");
  open_state();
}

const struct card *card(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, settle);
  return &the_card;
}

// ---------------------------------------------------------------- counting memory

static int is_alive(struct process *process) {
  if (process->is_gone || !process->pid) return 0;
  if (process->pid == getpid() || !kill(process->pid, 0) || errno != ESRCH) return 1;
  process->is_gone = 1;  // for good: its number may be given to another program
  return 0;
}

size_t card_used(int device) {
  card();
  size_t used = state->others[device];
  for (int64_t i = 0; i < state->count && i < MOST_PROCESSES; i++)
    if (is_alive(&state->processes[i])) used += state->processes[i].used[device];
  return used;
}

int card_processes(int device, unsigned *pids, unsigned long long *used, int room) {
  card();
  int n = 0;
  for (int64_t i = 0; i < state->count && n < room; i++)
    if (is_alive(&state->processes[i]) && state->processes[i].used[device])
      pids[n] = state->processes[i].pid, used[n++] = state->processes[i].used[device];
  return n;
}

static void count(int device, size_t bytes) {
  mine->used[device] += bytes;
  if (mine->used[device] > mine->peak[device]) mine->peak[device] = mine->used[device];
}

static void enter_locked(int device) {
  join();
  if (entered[device]) return;
  entered[device] = 1;
  count(device, context_bytes);
}

void card_enter(int device) {
  card();
  pthread_mutex_lock(&lock);
  enter_locked(device);
  pthread_mutex_unlock(&lock);
}

int card_entered(int device) { return entered[device]; }

// What other programs use for a moment, they give back after so many refusals; 0: never.
static int refusals_left;

int card_take(int device, size_t bytes) {
  card();
  pthread_mutex_lock(&lock);
  enter_locked(device);
  int fits = card_used(device) + bytes <= the_card.total_bytes;
  if (fits) count(device, bytes);
  else if (refusals_left && !--refusals_left) state->others[device] = 0;
  pthread_mutex_unlock(&lock);
  return fits;
}

void card_give_back(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  mine->used[device] -= bytes;
  pthread_mutex_unlock(&lock);
}

// ---------------------------------------------------------------- addresses

static size_t given_out[MOST_DEVICES];
static struct block { uintptr_t at; size_t size; } *blocks;  // that card_alloc made
static size_t n_blocks, room_blocks;

static void *map(int device, size_t bytes, int protection) {
  pthread_mutex_lock(&lock);
  uintptr_t at = FIRST + device * ARENA + given_out[device];
  given_out[device] += ROUND(bytes) + PAGE;  // and a gap, so that overruns fault
  pthread_mutex_unlock(&lock);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  void *got = mmap((void *)at, ROUND(bytes), protection, flags, -1, 0);
  return got == MAP_FAILED ? NULL : got;
}

void *card_reserve(int device, size_t bytes) { card(); return map(device, bytes, PROT_NONE); }

int card_device_of(const void *at) {
  uintptr_t address = (uintptr_t)at;
  if (address < FIRST || address >= FIRST + MOST_DEVICES * ARENA) return -1;
  return (address - FIRST) / ARENA;
}

void *card_alloc(int device, size_t bytes) {
  if (!card_take(device, ROUND(bytes))) return NULL;
  void *at = map(device, bytes, PROT_READ | PROT_WRITE);
  if (!at) {
    card_give_back(device, ROUND(bytes));
    return NULL;
  }
  pthread_mutex_lock(&lock);
  if (n_blocks == room_blocks) {
    room_blocks = room_blocks * 2 + 256;
    blocks = realloc(blocks, room_blocks * sizeof *blocks);
  }
  blocks[n_blocks++] = (struct block){(uintptr_t)at, ROUND(bytes)};  // so they are in order
  pthread_mutex_unlock(&lock);
  return at;
}

int card_free(void *at) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = n_blocks; i-- > 0;)
    if (blocks[i].at == (uintptr_t)at) {
      size = blocks[i].size;
      memmove(blocks + i, blocks + i + 1, (--n_blocks - i) * sizeof *blocks);
      break;
    }
  pthread_mutex_unlock(&lock);
  if (!size) return 0;
  munmap(at, size);
  card_give_back(card_device_of(at), size);
  return 1;
}

// ---------------------------------------------------------------- launches

static struct named { const char *function, *name; } *kernels;  // for the trace alone
static size_t n_kernels, room_kernels, n_sorted;

void card_name_kernel(const void *function, const char *name) {
  card();
  if (!trace_file) return;
  if (n_kernels == room_kernels) {
    room_kernels = room_kernels * 2 + 4096;
    kernels = realloc(kernels, room_kernels * sizeof *kernels);
  }
  kernels[n_kernels++] = (struct named){function, name};
}

static int by_function(const void *a, const void *b) {
  const char *x = ((struct named *)a)->function, *y = ((struct named *)b)->function;
  return x < y ? -1 : x > y;
}

static const char *name_of(const void *function) {
  if (n_sorted != n_kernels) qsort(kernels, n_kernels, sizeof *kernels, by_function);
  n_sorted = n_kernels;
  struct named key = {function, 0};
  struct named *found = bsearch(&key, kernels, n_kernels, sizeof key, by_function);
  return found ? found->name : "?";
}

// "LAUNCHES:VALUE,...": calls `apply` with the last value whose time has come.
static void follow(const char *plan, void (*apply)(const char *value)) {
  const char *due = NULL;
  for (; plan && *plan; plan = strchr(plan, ',') ? strchr(plan, ',') + 1 : NULL) {
    const char *value = strchr(plan, ':');
    if (value && mine->launches >= strtoll(plan, 0, 10)) due = value + 1;
  }
  if (due) apply(due);
}

// "MIB", "MIB*REFUSALS" for a moment, either followed by "@DEVICE" if not by whoever launches.
static void others_take(const char *value) {
  static const char *begun;
  char *end;
  size_t mib = strtoull(value, &end, 10);
  int refusals = *end == '*' ? strtol(end + 1, &end, 10) : 0;
  if (value == begun || (*end == '@' && atoi(end + 1) != card_current)) return;
  begun = value;
  state->others[card_current] = mib * MIB;
  refusals_left = refusals;
}

static const void *sent;  // where the host has put something last, unless a kernel ran since

void card_sent(const void *to) { sent = to; }

void card_launched(const char *name, const void *function) {
  card();
  pthread_mutex_lock(&lock);
  enter_locked(card_current);
  mine->launches++;
  if (!name || strcmp(name, "ncclBcast")) sent = NULL;  // by which every process keeps what it has
  if (is_disturbed) follow(getenv("CARD_OTHERS_AFTER"), others_take);
  if (trace_file) {
    fprintf(trace_file, "%s\n", name ? name : name_of(function));
    fflush(trace_file);
  }
  pthread_mutex_unlock(&lock);
}

void card_waited(const char *call) {
  card();
  pthread_mutex_lock(&lock);
  if (trace_file && traces_waits) {
    fprintf(trace_file, "wait: %s\n", call);
    fflush(trace_file);
  }
  pthread_mutex_unlock(&lock);
}

// ---------------------------------------------------------------- what is read back

static float scalar;
static void set_scalar(const char *value) { scalar = strtof(value, 0); }

void card_read_back(void *to, const void *from, size_t bytes) {
  if (!is_told_scalar || from == sent) return;
  pthread_mutex_lock(&lock);
  follow(getenv("CARD_SCALARS"), set_scalar);
  if (bytes == sizeof scalar || bytes == 3 * sizeof scalar)  // a loss, a norm; what SkipWatch keeps
    for (size_t i = 0; i < bytes / sizeof scalar; i++) ((float *)to)[i] = scalar;
  if (bytes == sizeof(int64_t)) *(int64_t *)to = 1;         // a number of things
  pthread_mutex_unlock(&lock);
}

// ---------------------------------------------------------------- the rest

void card_unknown(const char *kind, const char *name) {
  char line[300];
  int n = snprintf(line, sizeof line, "%s %s\n", kind, name);
  const char *path = getenv("CARD_CALLS");
  int file = path && *path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0666) : -1;
  if (write(file >= 0 ? file : 2, line, n) < 0) abort();
  if (file >= 0) close(file);
}

void *card_handle(void) {
  static uintptr_t last = 0x1000;
  return (void *)__sync_add_and_fetch(&last, 16);
}
