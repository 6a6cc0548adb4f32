#include <cstdio>
#include <string>

#include "enqueuer.h"

namespace hop_tf {
namespace {

thread_local const char* last_error = "";

// What nvcc was told to compile for, in rising order: 900 for compute capability 9.0.
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};

// Without std::to_string, because the library would export a table of that.
std::string InWords(int major, int minor) {
  char words[32];
  std::snprintf(words, sizeof(words), "%d.%d", major, minor);
  return words;
}

std::string VersionInWords(int version) { return InWords(version / 1000, version % 1000 / 10); }

std::string ErrorOfDevice(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (HopTfCudaIsBuiltFor(major, minor)) return "";
  return "the kernels are not built for compute capability " + InWords(major, minor);
}

std::string FindError() {
  int driver = 0, runtime = 0, num_devices = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return "there is no CUDA driver";
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  if (error == cudaErrorInsufficientDriver) {
    const std::string needed = VersionInWords(runtime);
    return "the driver supports CUDA " + VersionInWords(driver) + ", and the kernels need CUDA " + needed;
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  std::string words;
  for (int device = 0; device < num_devices && words.empty(); ++device) words = ErrorOfDevice(device);
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
  static const std::string error = hop_tf::FindError();
  return error.c_str();
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
