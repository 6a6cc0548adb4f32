// The C interface of hop_tf's CUDA kernels: the functions of kernels/hop_tf_kernels.h, on device memory.
// SketchAccumulate and Truncate16Accumulate are for processors only.
//
// Every function only enqueues work on `stream` (a cudaStream_t) and never waits for the device. Arrays are device
// memory, aligned like their elements. Results are those of the kernels for processors; sketch codes may differ by one
// where a bin lies on the boundary of two buckets, because sums are rounded in another order.
//
// Returns HOP_TF_OK, HOP_TF_INVALID_ARGUMENT, or HOP_TF_DEVICE_ERROR when the CUDA runtime refuses a launch.
// The library loads where there is no driver; functions then return HOP_TF_DEVICE_ERROR.

#ifndef HOP_TF_OPS_CUDA_HOP_TF_CUDA_H_
#define HOP_TF_OPS_CUDA_HOP_TF_CUDA_H_

#include <stdint.h>

#include "../kernels/hop_tf_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of scratch device memory that the functions below need, aligned to 256 bytes; contents do not matter.
HOP_TF_EXPORT int64_t HopTfCudaSketchWorkspaceBytes(int64_t num_values);
HOP_TF_EXPORT int64_t HopTfCudaInt8WorkspaceBytes(int64_t num_values, int64_t block_size);

HOP_TF_EXPORT HopTfStatus HopTfCudaSketchEncode(const void* values, HopTfType type, int64_t num_values, double spacing,
                                                uint8_t* codes, float* bucket_values, void* workspace, void* stream);
HOP_TF_EXPORT HopTfStatus HopTfCudaSketchDecode(const uint8_t* codes, const float* bucket_values, int64_t num_values,
                                                float* values, void* stream);
HOP_TF_EXPORT HopTfStatus HopTfCudaInt8Encode(const void* values, HopTfType type, int64_t num_values,
                                              int64_t block_size, int8_t* codes, float* scales, void* workspace,
                                              void* stream);
HOP_TF_EXPORT HopTfStatus HopTfCudaInt8Decode(const int8_t* codes, const float* scales, int64_t num_values,
                                              int64_t block_size, float* values, void* stream);
HOP_TF_EXPORT HopTfStatus HopTfCudaInt8Accumulate(const int8_t* codes, const float* scales, int64_t num_values,
                                                  int64_t block_size, float* accumulator, void* stream);
HOP_TF_EXPORT HopTfStatus HopTfCudaInt8Reduce(const int8_t* codes, const float* scales, const void* values,
                                              HopTfType type, int64_t num_values, int64_t block_size,
                                              int8_t* out_codes, float* out_scales, void* workspace, void* stream);
HOP_TF_EXPORT HopTfStatus HopTfCudaTruncate16Encode(const void* values, HopTfType type, int64_t num_values,
                                                    int round_to_nearest, uint16_t* halves, void* stream);
HOP_TF_EXPORT HopTfStatus HopTfCudaTruncate16Decode(const uint16_t* halves, int64_t num_values, float* values,
                                                    void* stream);

// Copies between arrays of the device.
HOP_TF_EXPORT HopTfStatus HopTfCudaCopy(const void* from, int64_t num_bytes, void* to, void* stream);

// The message of the last error on this thread, or "". Static memory.
HOP_TF_EXPORT const char* HopTfCudaLastError(void);

// Why the kernels cannot run on the devices of this process; "" if they can. The first call asks the driver for its
// devices and creates no context. Static memory.
HOP_TF_EXPORT const char* HopTfCudaError(void);

// True if the library holds code for devices of this compute capability.
HOP_TF_EXPORT int HopTfCudaIsBuiltFor(int major, int minor);

// Number of usable devices; 0 where there is no driver.
HOP_TF_EXPORT int HopTfCudaNumDevices(void);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // HOP_TF_OPS_CUDA_HOP_TF_CUDA_H_
