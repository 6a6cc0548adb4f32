// Stands for the CUDA driver: knows which memory is page-locked, and whether it is still mapped when that ends.

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

enum { kInvalid = 1, kOutOfMemory = 2, kNotInitialized = 3, kMost = 1000 };

static struct {
  void* address;
  size_t num_bytes;
} locked[kMost];
static int num_locked, num_errors, num_retained, most_locked = kMost, active_device = -1;
static __thread int depth;

int NumLocked(void) { return num_locked; }
int NumErrors(void) { return num_errors; }
int NumRetained(void) { return num_retained; }
void UseDevice(int device) { active_device = device; }
void LockAtMost(int number) { most_locked = number; }

int cuDeviceGetCount(int* count) {
  *count = 3;
  return active_device < 0 ? kNotInitialized : 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = device == active_device;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  num_errors += device != active_device;
  ++num_retained;
  *context = (void*)(intptr_t)(100 + device);
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  ++depth;
  return context == (void*)(intptr_t)(100 + active_device) ? 0 : kInvalid;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = NULL;
  return --depth < 0 ? kInvalid : 0;
}

int cuMemHostRegister_v2(void* address, size_t num_bytes, unsigned flags) {
  num_errors += depth != 1 || flags != 1 || (uintptr_t)address % sysconf(_SC_PAGESIZE) != 0;
  for (int i = 0; i < num_locked; ++i) {
    num_errors += locked[i].address == address;
  }
  if (num_locked == most_locked) return kOutOfMemory;
  locked[num_locked].address = address;
  locked[num_locked++].num_bytes = num_bytes;
  return 0;
}

int cuMemHostUnregister(void* address) {
  num_errors += depth != 1;
  for (int i = 0; i < num_locked; ++i) {
    if (locked[i].address != address) continue;
    num_errors += msync(address, locked[i].num_bytes, MS_ASYNC) != 0;  // It fails if memory is not mapped.
    locked[i] = locked[--num_locked];
    return 0;
  }
  ++num_errors;
  return kInvalid;
}
