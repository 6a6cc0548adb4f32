// Returns 0 if ops/tensorflow/gpu_stream.h finds the stream in the GpuDevice of TensorFlow's headers.

#define EIGEN_USE_GPU
#include "ops/tensorflow/gpu_stream.h"
#include "unsupported/Eigen/CXX11/Tensor"

class Stream : public Eigen::StreamInterface {
 public:
  const gpuStream_t& stream() const override { return address; }
  const gpuDeviceProp_t& deviceProperties() const override { return properties; }
  void* allocate(size_t) const override { return nullptr; }
  void deallocate(void*) const override {}
  void* scratchpad() const override { return nullptr; }
  unsigned int* semaphore() const override { return nullptr; }

  gpuStream_t address = reinterpret_cast<gpuStream_t>(0x57);
  gpuDeviceProp_t properties = {};
};

int main() {
  const Stream stream;
  const Eigen::GpuDevice device(&stream, /*num_blocks=*/1);
  const auto& ours = reinterpret_cast<const hop_tf::EigenGpuDevice&>(device);
  return ours.stream->stream() == stream.address ? 0 : 1;
}
