// A CUDA card without a GPU: its memory is real and counted, its kernels do nothing.
//
// card.c keeps the books; runtime.c, driver.c, blas.c, nvml.c and nccl.c are NVIDIA's libraries as far
// as torch and Triton call them; build.py adds a stub for every other name, which tells that it was
// called. README.md says what the settings in the environment do.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MIB ((size_t)1 << 20)
#define MOST_DEVICES 8

struct card {
  char name[256];
  int plugged;  // cards, as NVML counts them; of which CUDA shows some
  int devices, major, minor, processors;  // processors: streaming multiprocessors
  int driver;  // the newest CUDA it knows, as in 13000
  size_t total_bytes;
};

// The card as the environment describes it; the same for all devices.
const struct card *card(void);

// This process's context on a device, taken when the device is first used.
void card_enter(int device);
int card_entered(int device);

// Memory with an address, NULL if the card is full; card_free tells whether the address was known.
void *card_alloc(int device, size_t bytes);
int card_free(void *at);

// Memory and addresses apart, as expandable segments want them.
int card_take(int device, size_t bytes);
void card_give_back(int device, size_t bytes);
void *card_reserve(int device, size_t bytes);

// The device an address belongs to; -1 for the host's.
int card_device_of(const void *at);

// What all processes and other programs use of a device, and what each process does.
size_t card_used(int device);
int card_processes(int device, unsigned *pids, unsigned long long *used, int room);

// A kernel was launched: the one of this name, or of this host function.
void card_launched(const char *name, const void *function);
// The host asked to wait for the device.
void card_waited(const char *call);
void card_name_kernel(const void *function, const char *name);

// What a copy from the device to the host shall find, as kernels left nothing there; but what a copy
// has just put there is there.
void card_sent(const void *to);
void card_read_back(void *to, const void *from, size_t bytes);

// A call that nobody has written: told in the file $CARD_CALLS, or on standard error.
void card_unknown(const char *kind, const char *name);

// Handles that only have to differ from each other.
void *card_handle(void);

// The device that the calling thread has chosen.
extern __thread int card_current;
