// The kernels of each device under the same names, for `operations.cc`.

#ifndef HOP_TF_OPS_TENSORFLOW_DEVICE_H_
#define HOP_TF_OPS_TENSORFLOW_DEVICE_H_

#include <algorithm>
#include <utility>

#include "../cuda/hop_tf_cuda.h"
#include "../kernels/hop_tf_kernels.h"
#include "gpu_stream.h"
#include "registry.h"

// The process may lack libhop_tf_cuda.so. If it has that library, ops/native.py has loaded it before this one.
#pragma weak HopTfCudaError
#pragma weak HopTfCudaLastError
#pragma weak HopTfCudaCopy
#pragma weak HopTfCudaSketchWorkspaceBytes
#pragma weak HopTfCudaSketchEncode
#pragma weak HopTfCudaSketchDecode
#pragma weak HopTfCudaInt8WorkspaceBytes
#pragma weak HopTfCudaInt8Encode
#pragma weak HopTfCudaInt8Decode
#pragma weak HopTfCudaInt8Accumulate
#pragma weak HopTfCudaInt8Reduce
#pragma weak HopTfCudaTruncate16Encode
#pragma weak HopTfCudaTruncate16Decode

namespace hop_tf {

struct Cpu {
  static constexpr int kAllCores = 0;

  static const char* LastError() { return ""; }

  static HopTfStatus Copy(const Call&, const float* from, int64_t size, float* to) {
    std::copy_n(from, size, to);
    return HOP_TF_OK;
  }

  template <typename... Arguments>
  static HopTfStatus SketchEncode(const Call&, Arguments... arguments) {
    return HopTfSketchEncode(arguments..., kAllCores);
  }

  template <typename... Arguments>
  static HopTfStatus SketchDecode(const Call&, Arguments... arguments) {
    return HopTfSketchDecode(arguments..., kAllCores);
  }

  template <typename... Arguments>
  static HopTfStatus Int8Encode(const Call&, Arguments... arguments) {
    return HopTfInt8Encode(arguments..., kAllCores);
  }

  template <typename... Arguments>
  static HopTfStatus Int8Decode(const Call&, Arguments... arguments) {
    return HopTfInt8Decode(arguments..., kAllCores);
  }

  template <typename... Arguments>
  static HopTfStatus Int8Accumulate(const Call&, Arguments... arguments) {
    return HopTfInt8Accumulate(arguments..., kAllCores);
  }

  template <typename... Arguments>
  static HopTfStatus Int8Reduce(const Call&, Arguments... arguments) {
    return HopTfInt8Reduce(arguments..., kAllCores);
  }

  template <typename... Arguments>
  static HopTfStatus Truncate16Encode(const Call&, Arguments... arguments) {
    return HopTfTruncate16Encode(arguments..., kAllCores);
  }

  template <typename... Arguments>
  static HopTfStatus Truncate16Decode(const Call&, Arguments... arguments) {
    return HopTfTruncate16Decode(arguments..., kAllCores);
  }
};

struct Gpu {
  // True if libhop_tf_cuda.so is there, and all devices can run its kernels.
  static bool IsUsable() { return HopTfCudaError != nullptr && *HopTfCudaError() == '\0'; }

  static const char* LastError() { return HopTfCudaLastError(); }

  static HopTfStatus Copy(const Call& call, const float* from, int64_t size, float* to) {
    return HopTfCudaCopy(from, size * static_cast<int64_t>(sizeof(float)), to, StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus SketchEncode(const Call& call, const void* values, HopTfType type, int64_t size,
                                  Arguments... arguments) {
    const Tensor scratch = call.Scratch(HopTfCudaSketchWorkspaceBytes(size));
    return HopTfCudaSketchEncode(values, type, size, arguments..., scratch.data<void>(), StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus SketchDecode(const Call& call, Arguments... arguments) {
    return HopTfCudaSketchDecode(arguments..., StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus Int8Encode(const Call& call, const void* values, HopTfType type, int64_t size, int64_t block_size,
                                Arguments... arguments) {
    const Tensor scratch = call.Scratch(HopTfCudaInt8WorkspaceBytes(size, block_size));
    return HopTfCudaInt8Encode(values, type, size, block_size, arguments..., scratch.data<void>(), StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus Int8Decode(const Call& call, Arguments... arguments) {
    return HopTfCudaInt8Decode(arguments..., StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus Int8Accumulate(const Call& call, Arguments... arguments) {
    return HopTfCudaInt8Accumulate(arguments..., StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus Int8Reduce(const Call& call, const int8_t* codes, const float* scales, const void* values,
                                HopTfType type, int64_t size, int64_t block_size, Arguments... arguments) {
    const Tensor scratch = call.Scratch(HopTfCudaInt8WorkspaceBytes(size, block_size));
    return HopTfCudaInt8Reduce(codes, scales, values, type, size, block_size, arguments..., scratch.data<void>(),
                               StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus Truncate16Encode(const Call& call, Arguments... arguments) {
    return HopTfCudaTruncate16Encode(arguments..., StreamOf(call));
  }

  template <typename... Arguments>
  static HopTfStatus Truncate16Decode(const Call& call, Arguments... arguments) {
    return HopTfCudaTruncate16Decode(arguments..., StreamOf(call));
  }
};

}  // namespace hop_tf

#endif  // HOP_TF_OPS_TENSORFLOW_DEVICE_H_
