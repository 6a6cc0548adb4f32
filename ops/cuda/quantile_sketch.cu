// The quantile sketch, in the same steps as kernels/quantile_sketch.cc: count, refine, assign, encode. The host
// enqueues all steps at once; their results stay in device memory. Counters are integers, and rounded sums are added in
// a fixed order, so that results are the same in every run.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "enqueuer.h"
#include "packs.cuh"
#include "sketch_assign.cuh"
#include "sketch_bins.cuh"
#include "sketch_count.cuh"
#include "sketch_parts.cuh"

namespace hop_tf {
namespace {

constexpr int kLookUpThreads = 768;

// Blocks that fit on a multiprocessor at once for the look-up, and a multiple of that for decoding. Two tables of codes
// leave a cache for the codes of parts.
constexpr int kLookUpBlocksPerMultiprocessor = 2;
constexpr int kBlocksPerMultiprocessor = 32;

// Shared memory that a block needs besides the counters.
constexpr int kOtherSharedBytes = 1024;

template <int kWidth, typename T>
__global__ void __launch_bounds__(kLookUpThreads)
    LookUpCodes(const T* values, int64_t num_values, const SketchWorkspace* workspace, uint8_t* codes) {
  WaitForPreviousKernel();
  extern __shared__ uint4 shared_memory[];
  const auto* const code_packs = reinterpret_cast<const uint4*>(workspace->codes);
  const bool has_non_finite = workspace->has_non_finite != 0;
  for (uint32_t i = threadIdx.x; i < kNumBins / sizeof(uint4); i += blockDim.x) {
    shared_memory[i] = has_non_finite ? make_uint4(0, 0, 0, 0) : code_packs[i];
  }
  __syncthreads();

  const auto* const code_of_bin = reinterpret_cast<const uint8_t*>(shared_memory);
  const bool has_refined = workspace->HasRefined();
  const int part_shift = workspace->PartShift();
  const auto look_up = [&](uint32_t pattern) {
    const uint32_t bin = pattern >> kBinShift;
    const uint32_t place = has_refined ? workspace->place_of_bin[bin] : kNotRefined;
    if (place == kNotRefined) return code_of_bin[bin];
    return workspace->codes[SlotOfPart(place, pattern, part_shift)];
  };
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& patterns) {
    Pack<uint8_t, width> pack;
#pragma unroll
    for (int j = 0; j < width; ++j) pack.at[j] = look_up(patterns.at[j]);
    StorePack<width>(codes, i, pack);
  });
}

template <int kWidth>
__global__ void __launch_bounds__(kNumCodes)
    DecodeSketch(const uint8_t* codes, const float* bucket_values, int64_t num_values, float* values) {
  __shared__ float value_of_code[kNumCodes];
  value_of_code[threadIdx.x] = bucket_values[threadIdx.x];
  __syncthreads();
  const auto load = [&](auto width, int64_t i) { return LoadPack<width>(codes, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& pack) {
    Pack<float, width> floats;
#pragma unroll
    for (int j = 0; j < width; ++j) floats.at[j] = value_of_code[pack.at[j]];
    StorePack<width>(values, i, floats);
  });
}

Grid GridFor(Enqueuer& enqueuer, int64_t num_values, int num_threads, int blocks_per_multiprocessor,
             size_t shared_bytes) {
  const int64_t values_per_block = num_threads * kValuesPerThread;
  return {enqueuer.NumBlocks(num_values, values_per_block, blocks_per_multiprocessor), num_threads, shared_bytes};
}

template <typename T>
void EncodeSketch(const T* values, const SketchSettings& settings, uint8_t* codes, float* bucket_values,
                  SketchWorkspace* workspace, Enqueuer& enqueuer) {
  const int64_t num_values = settings.num_values;
  const int shared_bytes = enqueuer.DeviceAttribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - kOtherSharedBytes;
  const int num_exponents = std::clamp((shared_bytes - kHotSlotsBytes) / kBytesPerExponent, 1, kMaxExponents);
  const Grid count_grid = GridFor(enqueuer, num_values, kCountThreads, kCountBlocksPerMultiprocessor,
                                  kHotSlotsBytes + num_exponents * kBytesPerExponent);
  Grid part_grid = GridFor(enqueuer, num_values, kPartThreads, 1, shared_bytes);
  const uint32_t most_counters = PartCounters::MostCounters(shared_bytes);
  part_grid.num_blocks = std::max(part_grid.num_blocks, CeilDiv(kMaxParts, most_counters));  // One for each window.
  const Grid look_up_grid =
      GridFor(enqueuer, num_values, kLookUpThreads, kLookUpBlocksPerMultiprocessor, kNumBins * sizeof(uint8_t));
  const auto most_members = static_cast<uint32_t>(std::max<int64_t>(1, num_values / kRefineFraction));

  enqueuer.Clear(workspace, offsetof(SketchWorkspace, num_refined));
  WithWidth(IsAligned(values) && IsAligned(codes), [&](auto width) {
    enqueuer.Launch(CountBins<width, T>, count_grid, values, num_values, num_exponents, workspace);
    enqueuer.LaunchEarly(RefineBins, {kListBlocks, kListThreads}, most_members, settings, workspace);
    enqueuer.LaunchEarly(CountParts<width, T>, part_grid, values, num_values, most_counters, workspace);
    enqueuer.LaunchEarly(SumParts, {kRunBlocks, kListThreads}, settings, workspace);
    enqueuer.LaunchEarly(AssignKeys, {kListBlocks + kRunBlocks, kListThreads}, settings, workspace);
    enqueuer.LaunchEarly(WriteBuckets, {kNumCodes, kListThreads}, bucket_values, workspace);
    enqueuer.LaunchEarly(LookUpCodes<width, T>, look_up_grid, values, num_values, workspace, codes);
  });
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

int64_t HopTfCudaSketchWorkspaceBytes(int64_t num_values) { return num_values > 0 ? sizeof(SketchWorkspace) : 0; }

HopTfStatus HopTfCudaSketchEncode(const void* values, HopTfType type, int64_t num_values, double spacing,
                                  uint8_t* codes, float* bucket_values, void* workspace, void* stream) {
  if (!IsSize(num_values) || !IsType(type) || !(spacing > 0 && spacing <= 1)) return RefuseArguments();
  Enqueuer enqueuer(stream);
  if (num_values == 0) {
    enqueuer.Clear(bucket_values, kNumCodes * sizeof(float));
    return enqueuer.Finish();
  }
  WithType(values, type, [&](auto* typed) {
    EncodeSketch(typed, {num_values, spacing}, codes, bucket_values, static_cast<SketchWorkspace*>(workspace),
                 enqueuer);
  });
  return enqueuer.Finish();
}

HopTfStatus HopTfCudaSketchDecode(const uint8_t* codes, const float* bucket_values, int64_t num_values,
                                  float* values, void* stream) {
  if (!IsSize(num_values)) return RefuseArguments();
  if (num_values == 0) return HOP_TF_OK;
  Enqueuer enqueuer(stream);
  const Grid grid = GridFor(enqueuer, num_values, kNumCodes, kBlocksPerMultiprocessor, 0);
  WithWidth(IsAligned(codes) && IsAligned(values), [&](auto width) {
    enqueuer.Launch(DecodeSketch<width>, grid, codes, bucket_values, num_values, values);
  });
  return enqueuer.Finish();
}
