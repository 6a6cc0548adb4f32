#include <cstdint>

#include "enqueuer.h"
#include "packs.cuh"

namespace hop_tf {
namespace {

constexpr int kNumThreads = 256;
constexpr int kBlocksPerMultiprocessor = 32;

__device__ uint16_t Truncate(uint32_t pattern) {
  // What tells a nan from infinity may be in the lower half only.
  const uint32_t quiet = (pattern & kMagnitudeMask) > kInfinity ? kQuietBit : 0;
  return static_cast<uint16_t>((pattern | quiet) >> 16);
}

__device__ uint16_t Round(uint32_t pattern) {
  const uint32_t to_even = 0x7fffu + ((pattern >> 16) & 1u);
  const bool is_nan = (pattern & kMagnitudeMask) > kInfinity;
  return static_cast<uint16_t>((is_nan ? pattern | kQuietBit : pattern + to_even) >> 16);
}

template <int kWidth, typename T>
__global__ void __launch_bounds__(kNumThreads)
    EncodeHalves(const T* values, int64_t num_values, bool round, uint16_t* halves) {
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& patterns) {
    Pack<uint16_t, width> pack;
#pragma unroll
    for (int j = 0; j < width; ++j) pack.at[j] = round ? Round(patterns.at[j]) : Truncate(patterns.at[j]);
    StorePack<width>(halves, i, pack);
  });
}

template <int kWidth>
__global__ void __launch_bounds__(kNumThreads)
    DecodeHalves(const uint16_t* halves, int64_t num_values, float* values) {
  const auto load = [&](auto width, int64_t i) { return LoadPack<width>(halves, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& pack) {
    Pack<float, width> floats;
#pragma unroll
    for (int j = 0; j < width; ++j) floats.at[j] = __uint_as_float(static_cast<uint32_t>(pack.at[j]) << 16);
    StorePack<width>(values, i, floats);
  });
}

Grid GridFor(Enqueuer& enqueuer, int64_t num_values) {
  return {enqueuer.NumBlocks(num_values, kNumThreads * kValuesPerThread, kBlocksPerMultiprocessor), kNumThreads};
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfCudaTruncate16Encode(const void* values, HopTfType type, int64_t num_values, int round_to_nearest,
                                      uint16_t* halves, void* stream) {
  if (!IsSize(num_values) || !IsType(type)) return RefuseArguments();
  if (num_values == 0) return HOP_TF_OK;
  Enqueuer enqueuer(stream);
  WithType(values, type, [&](auto* typed) {
    WithWidth(IsAligned(typed) && IsAligned(halves), [&](auto width) {
      enqueuer.Launch(EncodeHalves<width, ElementOf<decltype(typed)>>, GridFor(enqueuer, num_values), typed, num_values,
                      round_to_nearest != 0, halves);
    });
  });
  return enqueuer.Finish();
}

HopTfStatus HopTfCudaTruncate16Decode(const uint16_t* halves, int64_t num_values, float* values, void* stream) {
  if (!IsSize(num_values)) return RefuseArguments();
  if (num_values == 0) return HOP_TF_OK;
  Enqueuer enqueuer(stream);
  WithWidth(IsAligned(halves) && IsAligned(values), [&](auto width) {
    enqueuer.Launch(DecodeHalves<width>, GridFor(enqueuer, num_values), halves, num_values, values);
  });
  return enqueuer.Finish();
}
