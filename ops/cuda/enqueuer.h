// Enqueues kernels on a stream, and keeps what the CUDA runtime says when it refuses one.

#ifndef HOP_TF_OPS_CUDA_ENQUEUER_H_
#define HOP_TF_OPS_CUDA_ENQUEUER_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "hop_tf_cuda.h"

namespace hop_tf {

// Keeps the message for HopTfCudaLastError, and returns the status for the caller.
HopTfStatus Refuse(HopTfStatus status, const char* message);

inline HopTfStatus RefuseArguments() { return Refuse(HOP_TF_INVALID_ARGUMENT, "an argument is out of range"); }

inline int64_t CeilDiv(int64_t numerator, int64_t denominator) { return (numerator + denominator - 1) / denominator; }

// How large a launch is.
struct Grid {
  int64_t num_blocks;
  int num_threads;  // Per block.
  size_t shared_bytes = 0;
  bool starts_early = false;
};

// Work for one stream of the current device. After a failure nothing more is enqueued.
class Enqueuer {
 public:
  explicit Enqueuer(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  template <typename... Parameters, typename... Arguments>
  void Launch(void (*kernel)(Parameters...), const Grid& grid, Arguments... arguments) {
    if (grid.shared_bytes > kSharedBytesOfAnyKernel) {
      Check([&] {
        return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(grid.shared_bytes));
      });
    }
    Check([&] {
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(static_cast<unsigned>(grid.num_blocks));
      config.blockDim = dim3(grid.num_threads);
      config.dynamicSmemBytes = grid.shared_bytes;
      config.stream = stream_;
      cudaLaunchAttribute early = {};
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
      config.attrs = &early;
      config.numAttrs = grid.starts_early && CanStartEarly() ? 1 : 0;
      return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
    });
  }

  // The kernel begins with WaitForPreviousKernel. What it takes to launch it passes while the previous kernel runs.
  template <typename... Parameters, typename... Arguments>
  void LaunchEarly(void (*kernel)(Parameters...), Grid grid, Arguments... arguments) {
    grid.starts_early = true;
    Launch(kernel, grid, arguments...);
  }

  void Clear(void* memory, size_t num_bytes) {
    Check([&] { return cudaMemsetAsync(memory, 0, num_bytes, stream_); });
  }

  void Copy(const void* from, size_t num_bytes, void* to) {
    Check([&] { return cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream_); });
  }

  // Blocks for a loop in strides of the grid: enough for `num_items`, and no more than keep the device busy.
  int64_t NumBlocks(int64_t num_items, int64_t items_per_block, int blocks_per_multiprocessor) {
    const int64_t most = int64_t{DeviceAttribute<cudaDevAttrMultiProcessorCount>()} * blocks_per_multiprocessor;
    return std::clamp<int64_t>(CeilDiv(num_items, items_per_block), 1, std::max<int64_t>(most, 1));
  }

  // Asks the runtime once per device, because asking costs host time on every call.
  template <cudaDeviceAttr kAttribute>
  int DeviceAttribute() {
    static std::array<std::atomic<int>, kMaxKnownDevices> known = {};  // 0 if unknown.
    int device = 0, value = 0;
    Check([&] { return cudaGetDevice(&device); });
    if (device < kMaxKnownDevices) value = known[device].load(std::memory_order_relaxed);
    if (value == 0) Check([&] { return cudaDeviceGetAttribute(&value, kAttribute, device); });
    if (device < kMaxKnownDevices) known[device].store(value, std::memory_order_relaxed);
    return value;
  }

  HopTfStatus Finish() const {
    return error_ == cudaSuccess ? HOP_TF_OK : Refuse(HOP_TF_DEVICE_ERROR, cudaGetErrorString(error_));
  }

 private:
  // More than this has to be asked for.
  static constexpr size_t kSharedBytesOfAnyKernel = 48 << 10;

  static constexpr int kMaxKnownDevices = 64;

  // Both the device and the code that it runs have to know how to wait.
  bool CanStartEarly() {
    return std::max({__CUDA_ARCH_LIST__}) >= 900 && DeviceAttribute<cudaDevAttrComputeCapabilityMajor>() >= 9;
  }

  template <typename Call>
  void Check(const Call& call) {
    if (error_ == cudaSuccess) error_ = call();
  }

  const cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_ENQUEUER_H_
