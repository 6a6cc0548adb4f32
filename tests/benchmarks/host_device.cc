// Stands in for a CUDA driver and for the library of CUDA kernels, on this machine's memory: "kernels" are those for
// processors, and run when they are enqueued. So scripts that need a device can be run without one.
//
// The environment variable HOST_DEVICE_FAULT makes it wrong: "unwritten" leaves out the last half of a 16-bit
// truncation of more than 1,000 values, "behind" writes behind the codes of a sketch, "late" finishes head starts at once.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "../../ops/cuda/hop_tf_cuda.h"

namespace {

constexpr int kNotReady = 600;
constexpr int kOutOfMemory = 2;

thread_local const char* last_error = "";

bool HasFault(const char* name) {
  const char* fault = std::getenv("HOST_DEVICE_FAULT");
  return fault != nullptr && std::strcmp(fault, name) == 0;
}

HopTfStatus Checked(HopTfStatus status) {
  if (status != HOP_TF_OK) last_error = "an argument is out of range";
  return status;
}

bool IsTooLarge(int64_t num_values) { return num_values > INT32_MAX; }

int64_t BlockSize(int64_t num_values, int64_t block_size) {
  return num_values > 0 && block_size > num_values ? num_values : block_size;
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

extern "C" {

// The driver.

HOP_TF_EXPORT int cuInit(unsigned) { return 0; }
HOP_TF_EXPORT int cuDeviceGet(int* device, int number) { return *device = number; }
HOP_TF_EXPORT int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
HOP_TF_EXPORT int cuCtxSetCurrent(void*) { return 0; }
HOP_TF_EXPORT int cuCtxSynchronize() { return 0; }
HOP_TF_EXPORT int cuStreamCreate(void** stream, unsigned) { return *stream = nullptr, 0; }
HOP_TF_EXPORT int cuGetErrorString(int, const char** message) { return *message = "failed on purpose", 0; }

HOP_TF_EXPORT int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "this machine's memory", size);
  return 0;
}

HOP_TF_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : 0;  // Compute capability 9.0.
  return 0;
}

HOP_TF_EXPORT int cuMemAlloc_v2(uint64_t* address, size_t num_bytes) {
  void* memory = std::aligned_alloc(256, (num_bytes + 255) / 256 * 256);
  *address = reinterpret_cast<uint64_t>(memory);
  return memory == nullptr ? kOutOfMemory : 0;
}

HOP_TF_EXPORT int cuMemFree_v2(uint64_t address) { return std::free(reinterpret_cast<void*>(address)), 0; }

HOP_TF_EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t num_bytes) {
  std::memcpy(reinterpret_cast<void*>(to), from, num_bytes);
  return 0;
}

HOP_TF_EXPORT int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t num_bytes) {
  std::memcpy(to, reinterpret_cast<void*>(from), num_bytes);
  return 0;
}

HOP_TF_EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t num_bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), num_bytes);
  return 0;
}

// Of memory as large as that of a head start only the beginning: it takes too long here.
HOP_TF_EXPORT int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t num_bytes, void*) {
  std::memset(reinterpret_cast<void*>(address), byte, num_bytes < (1u << 28) ? num_bytes : 1u << 10);
  return 0;
}

HOP_TF_EXPORT int cuEventCreate(void** event, unsigned) { return *event = new double(0), 0; }
HOP_TF_EXPORT int cuEventDestroy_v2(void* event) { return delete static_cast<double*>(event), 0; }
HOP_TF_EXPORT int cuEventRecord(void* event, void*) { return *static_cast<double*>(event) = Now(), 0; }
HOP_TF_EXPORT int cuEventQuery(void*) { return HasFault("late") ? 0 : kNotReady; }
HOP_TF_EXPORT int cuEventSynchronize(void*) { return 0; }

HOP_TF_EXPORT int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  *milliseconds = static_cast<float>((*static_cast<double*>(end) - *static_cast<double*>(begin)) * 1e3);
  return 0;
}

// The kernels.

const char* HopTfCudaLastError() { return last_error; }
const char* HopTfCudaError() { return ""; }
int HopTfCudaIsBuiltFor(int, int) { return 1; }
int HopTfCudaNumDevices() { return 1; }

int64_t HopTfCudaSketchWorkspaceBytes(int64_t num_values) { return num_values > 0 ? 1 << 10 : 0; }

int64_t HopTfCudaInt8WorkspaceBytes(int64_t num_values, int64_t block_size) {
  block_size = BlockSize(num_values, block_size);
  return block_size <= 1024 ? 0 : (num_values + block_size - 1) / block_size * 4;
}

HopTfStatus HopTfCudaSketchEncode(const void* values, HopTfType type, int64_t num_values, double spacing,
                                  uint8_t* codes, float* bucket_values, void*, void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  const HopTfStatus status = HopTfSketchEncode(values, type, num_values, spacing, codes, bucket_values, 1);
  if (HasFault("behind")) codes[num_values] = 0;
  return Checked(status);
}

HopTfStatus HopTfCudaSketchDecode(const uint8_t* codes, const float* bucket_values, int64_t num_values, float* values,
                                  void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  return Checked(HopTfSketchDecode(codes, bucket_values, num_values, values, 1));
}

HopTfStatus HopTfCudaInt8Encode(const void* values, HopTfType type, int64_t num_values, int64_t block_size,
                                int8_t* codes, float* scales, void*, void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  return Checked(HopTfInt8Encode(values, type, num_values, BlockSize(num_values, block_size), codes, scales, 1));
}

HopTfStatus HopTfCudaInt8Decode(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                                float* values, void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  return Checked(HopTfInt8Decode(codes, scales, num_values, BlockSize(num_values, block_size), values, 1));
}

HopTfStatus HopTfCudaInt8Accumulate(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                                    float* accumulator, void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  return Checked(HopTfInt8Accumulate(codes, scales, num_values, BlockSize(num_values, block_size), accumulator, 1));
}

HopTfStatus HopTfCudaInt8Reduce(const int8_t* codes, const float* scales, const void* values, HopTfType type,
                                int64_t num_values, int64_t block_size, int8_t* out_codes, float* out_scales, void*,
                                void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  block_size = BlockSize(num_values, block_size);
  return Checked(HopTfInt8Reduce(codes, scales, values, type, num_values, block_size, out_codes, out_scales, 1));
}

HopTfStatus HopTfCudaTruncate16Encode(const void* values, HopTfType type, int64_t num_values, int round_to_nearest,
                                      uint16_t* halves, void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  if (HasFault("unwritten") && num_values > 1000) num_values /= 2;
  return Checked(HopTfTruncate16Encode(values, type, num_values, round_to_nearest, halves, 1));
}

HopTfStatus HopTfCudaTruncate16Decode(const uint16_t* halves, int64_t num_values, float* values, void*) {
  if (IsTooLarge(num_values)) return Checked(HOP_TF_INVALID_ARGUMENT);
  return Checked(HopTfTruncate16Decode(halves, num_values, values, 1));
}

HopTfStatus HopTfCudaCopy(const void* from, int64_t num_bytes, void* to, void*) {
  if (num_bytes < 0) return Checked(HOP_TF_INVALID_ARGUMENT);
  std::memcpy(to, from, num_bytes);
  return HOP_TF_OK;
}

}  // extern "C"
