#include "enqueuer.h"

namespace hop_tf {
namespace {

thread_local const char* last_error = "";

}  // namespace

HopTfStatus Refuse(HopTfStatus status, const char* message) {
  last_error = message;
  return status;
}

}  // namespace hop_tf

HopTfStatus HopTfCudaCopy(const void* from, int64_t num_bytes, void* to, void* stream) {
  if (num_bytes < 0) return hop_tf::RefuseArguments();
  if (num_bytes == 0) return HOP_TF_OK;
  hop_tf::Enqueuer enqueuer(stream);
  enqueuer.Copy(from, static_cast<size_t>(num_bytes), to);
  return enqueuer.Finish();
}

const char* HopTfCudaLastError() { return hop_tf::last_error; }

int HopTfCudaNumDevices() {
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaSuccess) return num_devices;
  hop_tf::Refuse(HOP_TF_DEVICE_ERROR, cudaGetErrorString(error));
  return 0;
}
