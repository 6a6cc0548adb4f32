// A stand-in for libhop_tf_cuda.so: its functions on host memory, by the kernels for processors.
//
// With it the operations for GPUs run in tests on machines that have none. Like the kernels of a device, it takes the
// whole scratch memory that it asked for, and works on the stream of the operation only.

#include <cstdlib>
#include <cstring>

#include "../../../ops/cuda/hop_tf_cuda.h"
#include "memory.h"

namespace {

constexpr int kOneThread = 1;
constexpr int64_t kWorkspaceBytes = 1000;

HopTfStatus OnStream(const void* stream, HopTfStatus status) {
  return stream == stand_in::HostMemory::kStream ? status : HOP_TF_DEVICE_ERROR;
}

void Use(void* workspace) { std::memset(workspace, 0, kWorkspaceBytes); }

}  // namespace

// The test says why devices cannot run the kernels.
const char* HopTfCudaError() {
  const char* error = std::getenv("STAND_IN_CUDA_ERROR");
  return error == nullptr ? "" : error;
}

const char* HopTfCudaLastError() { return "the stream is not the operation's"; }

int64_t HopTfCudaSketchWorkspaceBytes(int64_t) { return kWorkspaceBytes; }
int64_t HopTfCudaInt8WorkspaceBytes(int64_t, int64_t) { return kWorkspaceBytes; }

HopTfStatus HopTfCudaCopy(const void* from, int64_t num_bytes, void* to, void* stream) {
  if (num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
  return OnStream(stream, HOP_TF_OK);
}

HopTfStatus HopTfCudaSketchEncode(const void* values, HopTfType type, int64_t num_values, double spacing,
                                  uint8_t* codes, float* bucket_values, void* workspace, void* stream) {
  Use(workspace);
  return OnStream(stream, HopTfSketchEncode(values, type, num_values, spacing, codes, bucket_values, kOneThread));
}

HopTfStatus HopTfCudaSketchDecode(const uint8_t* codes, const float* bucket_values, int64_t num_values, float* values,
                                  void* stream) {
  return OnStream(stream, HopTfSketchDecode(codes, bucket_values, num_values, values, kOneThread));
}

HopTfStatus HopTfCudaInt8Encode(const void* values, HopTfType type, int64_t num_values, int64_t block_size,
                                int8_t* codes, float* scales, void* workspace, void* stream) {
  Use(workspace);
  return OnStream(stream, HopTfInt8Encode(values, type, num_values, block_size, codes, scales, kOneThread));
}

HopTfStatus HopTfCudaInt8Decode(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                                float* values, void* stream) {
  return OnStream(stream, HopTfInt8Decode(codes, scales, num_values, block_size, values, kOneThread));
}

HopTfStatus HopTfCudaInt8Accumulate(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                                    float* accumulator, void* stream) {
  return OnStream(stream, HopTfInt8Accumulate(codes, scales, num_values, block_size, accumulator, kOneThread));
}

HopTfStatus HopTfCudaInt8Reduce(const int8_t* codes, const float* scales, const void* values, HopTfType type,
                                int64_t num_values, int64_t block_size, int8_t* out_codes, float* out_scales,
                                void* workspace, void* stream) {
  Use(workspace);
  return OnStream(stream, HopTfInt8Reduce(codes, scales, values, type, num_values, block_size, out_codes, out_scales,
                                          kOneThread));
}

HopTfStatus HopTfCudaTruncate16Encode(const void* values, HopTfType type, int64_t num_values, int round_to_nearest,
                                      uint16_t* halves, void* stream) {
  return OnStream(stream, HopTfTruncate16Encode(values, type, num_values, round_to_nearest, halves, kOneThread));
}

HopTfStatus HopTfCudaTruncate16Decode(const uint16_t* halves, int64_t num_values, float* values, void* stream) {
  return OnStream(stream, HopTfTruncate16Decode(halves, num_values, values, kOneThread));
}
