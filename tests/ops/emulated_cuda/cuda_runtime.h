// Stands in for the CUDA runtime where there is no device: kernels run on the processor, in this machine's memory.
//
// The blocks of a grid run one after another. The threads of a block are contexts that take turns: each runs until it
// has to wait for its warp or its block. The environment variable EMULATED_SEED is the seed of their order, and
// without it they run in theirs. So a kernel that misses a barrier may compute something else in some orders. A thread
// that waits for its warp while another one of the warp waits for the block ends the program, and so does a block that
// writes behind its shared memory. Additions that ought to be atomic, and early starts of kernels, are not tried.
//
// The sources need one change, which `ops_cuda_emulated_test.py` makes: `extern __shared__` arrays become pointers to
// `emulated::dynamic_shared_memory`.

#ifndef HOP_TF_TESTS_OPS_EMULATED_CUDA_CUDA_RUNTIME_H_
#define HOP_TF_TESTS_OPS_EMULATED_CUDA_CUDA_RUNTIME_H_

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../../ops/kernels/float_bits.h"

// After the standard library, which has some of these names.
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __CUDA_ARCH_LIST__ 900

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1) : x(x) {}
};

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {

constexpr int kWarpSize = 32, kMaxThreads = 1024, kMaxSharedBytes = 227 << 10, kMultiprocessors = 2;
constexpr size_t kStackBytes = 64 << 10;
constexpr char kPoison = 0x5b;

enum class State { kRuns, kWaitsForWarp, kWaitsForBlock, kEnded };

struct Thread {
  State state = State::kEnded;
  bool is_new = true;
  jmp_buf position;
  ucontext_t beginning;
  std::unique_ptr<char[]> stack;
  std::array<unsigned, 2> num_exchanges = {};  // Within the warp, and within the block.
};

inline std::array<Thread, kMaxThreads> threads;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
alignas(256) inline char dynamic_shared_memory[kMaxSharedBytes];

// What threads give each other, within the warp and within the block. There are two arrays of each, because a thread
// may give its next value while another one still reads this one.
inline std::array<std::array<uint64_t, 2>, kMaxThreads> given[2][2];

inline int SharedBytes() {
  const char* bytes = std::getenv("EMULATED_SHARED_BYTES");
  return bytes == nullptr ? kMaxSharedBytes : std::atoi(bytes);
}

// The numbers below `end`, in an order that is another one at each call if there is a seed.
inline std::vector<unsigned> Order(unsigned end) {
  static const char* const seed = std::getenv("EMULATED_SEED");
  static std::minstd_rand generator(seed == nullptr ? 1 : std::atoi(seed));
  std::vector<unsigned> order(end);
  std::iota(order.begin(), order.end(), 0);
  if (seed != nullptr) std::shuffle(order.begin(), order.end(), generator);
  return order;
}

inline void Wait(State state) {
  Thread& thread = threads[threadIdx.x];
  thread.state = state;
  if (_setjmp(thread.position) == 0) _longjmp(scheduler, 1);
}

inline void RunThread() {
  for (;;) {
    kernel();
    Wait(State::kEnded);
  }
}

inline void Continue(unsigned index) {
  threadIdx.x = index;
  Thread& thread = threads[index];
  thread.state = State::kRuns;
  if (_setjmp(scheduler) != 0) return;
  if (!thread.is_new) _longjmp(thread.position, 1);
  thread.is_new = false;
  thread.stack.reset(new char[kStackBytes]);
  getcontext(&thread.beginning);
  thread.beginning.uc_stack.ss_sp = thread.stack.get();
  thread.beginning.uc_stack.ss_size = kStackBytes;
  makecontext(&thread.beginning, RunThread, 0);
  setcontext(&thread.beginning);
}

inline void Fail(const char* message) {
  std::fprintf(stderr, "emulated CUDA: %s\n", message);
  std::abort();
}

// Runs a warp until all its threads wait for the block or have ended. Returns false if all have ended.
inline bool RunWarp(unsigned begin, unsigned size) {
  for (;;) {
    unsigned num_ended = 0, num_waiting = 0;
    for (const unsigned lane : Order(size)) {
      const Thread& thread = threads[begin + lane];
      if (thread.state != State::kEnded) Continue(begin + lane);
      num_ended += thread.state == State::kEnded;
      num_waiting += thread.state == State::kWaitsForWarp;
    }
    if (num_waiting == 0) return num_ended < size;
    if (num_waiting < size) Fail("not all threads of a warp came to the same point");
  }
}

inline void RunBlock(size_t num_shared_bytes) {
  std::memset(dynamic_shared_memory, kPoison, sizeof(dynamic_shared_memory));
  for (unsigned i = 0; i < blockDim.x; ++i) threads[i].state = State::kWaitsForBlock, threads[i].num_exchanges = {};
  bool runs = true;
  while (runs) {
    runs = false;
    for (const unsigned warp : Order((blockDim.x + kWarpSize - 1) / kWarpSize)) {
      runs |= RunWarp(warp * kWarpSize, std::min<unsigned>(kWarpSize, blockDim.x - warp * kWarpSize));
    }
  }
  const char *begin = dynamic_shared_memory + num_shared_bytes, *end = std::end(dynamic_shared_memory);
  const bool is_intact = std::all_of(begin, end, [](char c) { return c == kPoison; });
  if (!is_intact) Fail("a kernel wrote behind its shared memory");
}

// Gives a value to all threads that wait in the same state, and returns those of the threads.
template <typename T>
const std::array<std::array<uint64_t, 2>, kMaxThreads>& Exchange(const T& value, State state) {
  static_assert(sizeof(T) <= 2 * sizeof(uint64_t));
  const int scope = state == State::kWaitsForBlock;
  auto& round = given[scope][threads[threadIdx.x].num_exchanges[scope]++ % 2];
  std::memcpy(&round[threadIdx.x], &value, sizeof(T));
  Wait(state);
  return round;
}

template <typename T>
T Shuffle(const T& value, int source) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const auto& round = Exchange(value, State::kWaitsForWarp);
  T found = value;
  if (source >= 0 && source < kWarpSize) std::memcpy(&found, &round[threadIdx.x - lane + source], sizeof(T));
  return found;
}

}  // namespace emulated

// Synchronization.

inline void __syncthreads() { emulated::Wait(emulated::State::kWaitsForBlock); }

inline void __syncwarp() { emulated::Wait(emulated::State::kWaitsForWarp); }

inline int __syncthreads_count(int value) {
  const auto& round = emulated::Exchange<uint64_t>(value != 0, emulated::State::kWaitsForBlock);
  int count = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) count += static_cast<int>(round[i][0]);
  return count;
}

inline int __syncthreads_or(int value) { return __syncthreads_count(value) > 0; }

template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  return emulated::Shuffle(value, static_cast<int>(threadIdx.x % emulated::kWarpSize) - distance);
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::Shuffle(value, static_cast<int>(threadIdx.x % emulated::kWarpSize) ^ mask);
}

inline unsigned __match_any_sync(unsigned, uint32_t value) {
  const unsigned begin = threadIdx.x / emulated::kWarpSize * emulated::kWarpSize;
  const auto& round = emulated::Exchange<uint64_t>(value, emulated::State::kWaitsForWarp);
  unsigned lanes = 0;
  for (int i = 0; i < emulated::kWarpSize; ++i) lanes |= unsigned{round[begin + i][0] == value} << i;
  return lanes;
}

// Arithmetic.

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline uint32_t __float_as_uint(float value) { return hop_tf::ToBits(value); }
inline float __uint_as_float(uint32_t bits) { return hop_tf::FromBits(bits); }

using std::max;
using std::min;

template <typename T>
T atomicAdd(T* target, T value) {
  return std::exchange(*target, *target + value);
}

template <typename T>
T atomicMax(T* target, T value) {
  return std::exchange(*target, std::max(*target, value));
}

template <typename T>
T atomicExch(T* target, T value) {
  return std::exchange(*target, value);
}

template <typename T>
T atomicCAS(T* target, T expected, T value) {
  const T old = *target;
  if (old == expected) *target = value;
  return old;
}

// The runtime.

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInsufficientDriver };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
using cudaStream_t = void*;

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }

inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int values[] = {emulated::SharedBytes(), emulated::kMultiprocessors, 9, 0};
  return *value = values[attribute], cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int num_bytes) {
  return num_bytes <= emulated::SharedBytes() ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaMemsetAsync(void* memory, int byte, size_t num_bytes, cudaStream_t) {
  return std::memset(memory, byte, num_bytes), cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, num_bytes), cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  const bool is_too_large = config->dynamicSmemBytes > static_cast<size_t>(emulated::SharedBytes());
  if (config->gridDim.x == 0 || config->blockDim.x > emulated::kMaxThreads || is_too_large) {
    return cudaErrorInvalidValue;
  }
  gridDim = config->gridDim, blockDim = config->blockDim;
  emulated::kernel = [=] { kernel(arguments...); };
  for (const unsigned block : emulated::Order(gridDim.x)) {
    blockIdx.x = block;
    emulated::RunBlock(config->dynamicSmemBytes);
  }
  return cudaSuccess;
}

#endif  // HOP_TF_TESTS_OPS_EMULATED_CUDA_CUDA_RUNTIME_H_
