// The CUDA stream of an operation.
//
// TensorFlow's C API tells the stream of devices that were added through it only, not of its own GPUs. So TensorFlow's
// own method is asked, by its name in the library. The reference is weak: this library loads without that method, too.

#ifndef HOP_TF_OPS_TENSORFLOW_GPU_STREAM_H_
#define HOP_TF_OPS_TENSORFLOW_GPU_STREAM_H_

#include "registry.h"

namespace hop_tf {

// Eigen's classes, as far as they are needed; their layout has been the same for years.
class EigenStreamInterface {
 public:
  virtual ~EigenStreamInterface() = default;
  virtual void* const& stream() const = 0;  // The cudaStream_t.
};

struct EigenGpuDevice {
  const EigenStreamInterface* stream;
};

// const Eigen::GpuDevice& tensorflow::OpKernelContext::eigen_device<Eigen::GpuDevice>() const
extern "C" const EigenGpuDevice* EigenGpuDeviceOf(const TF_OpKernelContext* context) __asm__(
    "_ZNK10tensorflow15OpKernelContext12eigen_deviceIN5Eigen9GpuDeviceEEERKT_v") __attribute__((weak));

inline void* StreamOf(const Call& call) {
  if (EigenGpuDeviceOf == nullptr) {
    throw Failure{TF_INTERNAL, "this TensorFlow does not tell the stream of an operation on a GPU."};
  }
  return EigenGpuDeviceOf(call.context())->stream->stream();
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_TENSORFLOW_GPU_STREAM_H_
