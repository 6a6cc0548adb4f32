// TensorFlow operations over the kernels, for processors and, if the CUDA kernels can run here, for GPUs.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../kernels/constants.h"
#include "device.h"
#include "registry.h"

namespace hop_tf {
namespace {

constexpr int64_t kMaxValues = INT32_MAX;

// What is said of a number that is out of range.
template <typename Number>
std::string Received(const char* name, const char* rule, Number number) {
  return "`" + std::string(name) + "` must be " + rule + ". Received: " + name + "=" + std::to_string(number) + ".";
}

// The attribute, with 0 for the whole of `size` values.
int64_t BlockSize(const Call& call, int64_t size) {
  const int64_t block_size = call.attributes().block_size;
  Check(block_size >= 0 && block_size <= kMaxValues, Received("block_size", "from 0 to 2^31 - 1", block_size));
  return block_size > 0 ? block_size : std::max<int64_t>(size, 1);
}

int64_t NumBlocks(int64_t size, int64_t block_size) { return (size + block_size - 1) / block_size; }

void CheckSameShape(const char* name, const Tensor& tensor, const Tensor& codes) {
  Check(tensor.shape() == codes.shape(), "`" + std::string(name) + "` must have the shape of `codes`, " +
                                             codes.ShapeInWords() + ". Received: shape " + tensor.ShapeInWords() + ".");
}

void CheckScales(const Tensor& scales, const Tensor& codes, int64_t block_size) {
  const std::vector<int64_t> expected = {NumBlocks(codes.size(), block_size)};
  Check(scales.shape() == expected,
        "`scales` must have " + std::to_string(expected[0]) + " values for " + std::to_string(codes.size()) +
            " codes in blocks of " + std::to_string(block_size) + ". Received: shape " + scales.ShapeInWords() + ".");
}

template <typename Device>
void CheckStatus(HopTfStatus status) {
  Check(status, status == HOP_TF_DEVICE_ERROR ? Device::LastError() : "");
}

template <typename Device>
void SketchEncode(const Call& call) {
  const Tensor values = call.Input(0);
  const float spacing = call.attributes().spacing;
  Check(spacing > 0 && spacing <= 1, Received("spacing", "above 0 and at most 1", spacing));
  const Tensor codes = call.Output(0, TF_UINT8, values.shape());
  const Tensor bucket_values = call.Output(1, TF_FLOAT, {kNumCodes});
  CheckStatus<Device>(Device::SketchEncode(call, values.data<void>(), TypeOf(values), values.size(), spacing,
                                           codes.data<uint8_t>(), bucket_values.data<float>()));
}

template <typename Device>
void SketchDecode(const Call& call) {
  const Tensor codes = call.Input(0), bucket_values = call.Input(1);
  Check(bucket_values.shape() == std::vector<int64_t>{kNumCodes},
        "`bucket_values` must have " + std::to_string(kNumCodes) + " values. Received: shape " +
            bucket_values.ShapeInWords() + ".");
  const Tensor values = call.Output(0, TF_FLOAT, codes.shape());
  CheckStatus<Device>(Device::SketchDecode(call, codes.data<uint8_t>(), bucket_values.data<float>(), codes.size(),
                                           values.data<float>()));
}

template <typename Device>
void Int8Encode(const Call& call) {
  const Tensor values = call.Input(0);
  const int64_t block_size = BlockSize(call, values.size());
  const Tensor codes = call.Output(0, TF_INT8, values.shape());
  const Tensor scales = call.Output(1, TF_FLOAT, {NumBlocks(values.size(), block_size)});
  CheckStatus<Device>(Device::Int8Encode(call, values.data<void>(), TypeOf(values), values.size(), block_size,
                                         codes.data<int8_t>(), scales.data<float>()));
}

template <typename Device>
void Int8Decode(const Call& call) {
  const Tensor codes = call.Input(0), scales = call.Input(1);
  const int64_t block_size = BlockSize(call, codes.size());
  CheckScales(scales, codes, block_size);
  const Tensor values = call.Output(0, TF_FLOAT, codes.shape());
  CheckStatus<Device>(Device::Int8Decode(call, codes.data<int8_t>(), scales.data<float>(), codes.size(), block_size,
                                         values.data<float>()));
}

// Holds no Tensor of the input beyond the call: its memory could not become the output's. TensorFlow keeps the input.
const float* AccumulatorData(const Call& call, const Tensor& codes) {
  const Tensor accumulator = call.Input(2);
  CheckSameShape("accumulator", accumulator, codes);
  return accumulator.data<float>();
}

template <typename Device>
void Int8Accumulate(const Call& call) {
  const Tensor codes = call.Input(0), scales = call.Input(1);
  const int64_t block_size = BlockSize(call, codes.size());
  CheckScales(scales, codes, block_size);
  const float* terms = AccumulatorData(call, codes);
  const Tensor sum = call.ForwardedOutput(0, 2, codes.shape());
  if (sum.data<float>() != terms) CheckStatus<Device>(Device::Copy(call, terms, sum.size(), sum.data<float>()));
  CheckStatus<Device>(Device::Int8Accumulate(call, codes.data<int8_t>(), scales.data<float>(), codes.size(), block_size,
                                             sum.data<float>()));
}

template <typename Device>
void Int8Reduce(const Call& call) {
  const Tensor codes = call.Input(0), scales = call.Input(1), values = call.Input(2);
  const int64_t block_size = BlockSize(call, codes.size());
  CheckScales(scales, codes, block_size);
  CheckSameShape("values", values, codes);
  const Tensor out_codes = call.Output(0, TF_INT8, codes.shape());
  const Tensor out_scales = call.Output(1, TF_FLOAT, scales.shape());
  CheckStatus<Device>(Device::Int8Reduce(call, codes.data<int8_t>(), scales.data<float>(), values.data<void>(),
                                         TypeOf(values), codes.size(), block_size, out_codes.data<int8_t>(),
                                         out_scales.data<float>()));
}

template <typename Device>
void Truncate16Encode(const Call& call) {
  const Tensor values = call.Input(0);
  const Tensor halves = call.Output(0, TF_BFLOAT16, values.shape());
  CheckStatus<Device>(Device::Truncate16Encode(call, values.data<void>(), TypeOf(values), values.size(),
                                               call.attributes().round_to_nearest, halves.data<uint16_t>()));
}

template <typename Device>
void Truncate16Decode(const Call& call) {
  const Tensor halves = call.Input(0);
  const Tensor values = call.Output(0, TF_FLOAT, halves.shape());
  CheckStatus<Device>(Device::Truncate16Decode(call, halves.data<uint16_t>(), halves.size(), values.data<float>()));
}

template <typename Device>
void RegisterKernels(const char* device) {
  RegisterKernel<SketchEncode<Device>>("HopTfSketchEncode", device);
  RegisterKernel<SketchDecode<Device>>("HopTfSketchDecode", device);
  RegisterKernel<Int8Encode<Device>>("HopTfInt8Encode", device);
  RegisterKernel<Int8Decode<Device>>("HopTfInt8Decode", device);
  RegisterKernel<Int8Accumulate<Device>>("HopTfInt8Accumulate", device);
  RegisterKernel<Int8Reduce<Device>>("HopTfInt8Reduce", device);
  RegisterKernel<Truncate16Encode<Device>>("HopTfTruncate16Encode", device);
  RegisterKernel<Truncate16Decode<Device>>("HopTfTruncate16Decode", device);
}

constexpr char kFloats[] = "T: {float, bfloat16, half}";
constexpr char kBlockSize[] = "block_size: int = 512";

void RegisterOperations() {
  RegisterOperation({"HopTfSketchEncode",
                     {"spacing: float = 0.5", kFloats},
                     {"values: T"},
                     {"codes: uint8", "bucket_values: float"}});
  RegisterOperation({"HopTfSketchDecode", {}, {"codes: uint8", "bucket_values: float"}, {"values: float"}});
  RegisterOperation({"HopTfInt8Encode", {kBlockSize, kFloats}, {"values: T"}, {"codes: int8", "scales: float"}});
  RegisterOperation({"HopTfInt8Decode", {kBlockSize}, {"codes: int8", "scales: float"}, {"values: float"}});
  RegisterOperation(
      {"HopTfInt8Accumulate", {kBlockSize}, {"codes: int8", "scales: float", "accumulator: float"}, {"sum: float"}});
  RegisterOperation({"HopTfInt8Reduce",
                     {kBlockSize, kFloats},
                     {"codes: int8", "scales: float", "values: T"},
                     {"sum_codes: int8", "sum_scales: float"},
                     InferBothShapes});
  RegisterOperation(
      {"HopTfTruncate16Encode", {"round_to_nearest: bool = false", kFloats}, {"values: T"}, {"halves: bfloat16"}});
  RegisterOperation({"HopTfTruncate16Decode", {}, {"halves: bfloat16"}, {"values: float"}});
}

// Runs when the library is loaded.
const bool registered = [] {
  RegisterOperations();
  RegisterKernels<Cpu>("CPU");
  // Without kernels for GPUs, TensorFlow places the operations on the processor.
  if (Gpu::IsUsable()) RegisterKernels<Gpu>("GPU");
  return true;
}();

}  // namespace
}  // namespace hop_tf
