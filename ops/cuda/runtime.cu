#include <cstdio>

#include "enqueuer.h"

namespace hop_tf {
namespace {

thread_local const char* last_error = "";

// The architectures that nvcc compiles for, in rising order: 900 for compute capability 9.0.
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

// Why devices cannot run the kernels. With std::string or std::to_string, this library would export symbols of the C++
// library.
char device_error[128] = "";

template <typename... Numbers>
const char* Say(const char* format, Numbers... numbers) {
  std::snprintf(device_error, sizeof(device_error), format, numbers...);
  return device_error;
}

const char* ErrorOfDevice(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (HopTfCudaIsBuiltFor(major, minor)) return "";
  return Say("the kernels are not built for compute capability %d.%d", major, minor);
}

const char* FindError() {
  int driver = 0, runtime = 0, num_devices = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return "there is no CUDA driver";
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaErrorInsufficientDriver) {
    return Say("the driver supports CUDA %d.%d, and the kernels need CUDA %d.%d", driver / 1000, driver % 1000 / 10,
               runtime / 1000, runtime % 1000 / 10);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const char* words = "";
  for (int device = 0; device < num_devices && *words == '\0'; ++device) words = ErrorOfDevice(device);
  return words;
}

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

const char* HopTfCudaError() {
  static const char* const error = hop_tf::FindError();
  return error;
}

int HopTfCudaIsBuiltFor(int major, int minor) {
  const int capability = major * 100 + minor * 10;
  int last = 0;
  for (const int architecture : hop_tf::kArchitectures) {
    // Machine code also runs on later devices of the same major version.
    if (architecture / 100 == major && architecture <= capability) return 1;
    last = architecture;
  }
  return last < capability;  // Of the last architecture there is PTX, too.
}

int HopTfCudaNumDevices() {
  int num_devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaSuccess) return num_devices;
  hop_tf::Refuse(HOP_TF_DEVICE_ERROR, cudaGetErrorString(error));
  return 0;
}
