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
#include "sketch_halves.cuh"
#include "sketch_parts.cuh"

namespace hop_tf {
namespace {

constexpr int kLookUpThreads = 1024;

// Blocks per multiprocessor for decoding.
constexpr int kBlocksPerMultiprocessor = 32;

// Shared memory that a block needs besides the counters.
constexpr int kOtherSharedBytes = 1024;

// The code of each bin, in shared memory.
class CodesOfBins {
 public:
  static constexpr int kSharedBytes = kNumBins * sizeof(uint8_t);

  // The whole block calls it, as it does the other tables'.
  __device__ CodesOfBins(uint4* shared_memory, const SketchWorkspace& workspace)
      : codes_(reinterpret_cast<const uint8_t*>(shared_memory)) {
    const auto* const packs = reinterpret_cast<const uint4*>(workspace.codes);
    const bool has_non_finite = workspace.has_non_finite != 0;
    for (uint32_t i = threadIdx.x; i < kNumBins / sizeof(uint4); i += kLookUpThreads) {
      shared_memory[i] = has_non_finite ? make_uint4(0, 0, 0, 0) : packs[i];
    }
    __syncthreads();
  }

  __device__ uint8_t operator[](uint32_t pattern) const { return codes_[pattern >> kBinShift]; }

 private:
  const uint8_t* const codes_;
};

// The code of each part, in device memory, and of each other bin.
class CodesOfFarParts {
 public:
  __device__ CodesOfFarParts(uint4* shared_memory, const SketchWorkspace& workspace)
      : codes_of_bins_(shared_memory, workspace), workspace_(workspace), shift_(workspace.PartShift()) {}

  __device__ uint8_t operator[](uint32_t pattern) const {
    const uint32_t place = workspace_.place_of_bin[pattern >> kBinShift];
    return place == kNotRefined ? codes_of_bins_[pattern] : workspace_.codes[SlotOfPart(place, pattern, shift_)];
  }

 private:
  const CodesOfBins codes_of_bins_;
  const SketchWorkspace& workspace_;
  const int shift_;
};

// The same, all in shared memory: for each bin its code, or the place of its parts; and the code of each part.
class CodesOfNearParts {
 public:
  static constexpr int kSharedBytes = kNumBins * sizeof(uint16_t) + kMaxParts * sizeof(uint8_t);

  __device__ CodesOfNearParts(uint4* shared_memory, const SketchWorkspace& workspace)
      : bins_(reinterpret_cast<uint16_t*>(shared_memory)),
        parts_(reinterpret_cast<uint8_t*>(bins_ + kNumBins)),
        shift_(workspace.PartShift()) {
    constexpr int kBinsAtOnce = 4;
    for (uint32_t bin = kBinsAtOnce * threadIdx.x; bin < kNumBins; bin += kBinsAtOnce * kLookUpThreads) {
      Pack<uint16_t, kBinsAtOnce> pack = LoadPack<kBinsAtOnce>(workspace.place_of_bin, bin);
      const Pack<uint8_t, kBinsAtOnce> codes = LoadPack<kBinsAtOnce>(workspace.codes, bin);
#pragma unroll
      for (int i = 0; i < kBinsAtOnce; ++i) {
        pack.at[i] = pack.at[i] == kNotRefined ? codes.at[i] : pack.at[i] + kPlaces;
      }
      StorePack<kBinsAtOnce>(bins_, bin, pack);
    }
    const uint32_t num_parts = workspace.num_refined * PartsPerPlace(shift_);
    for (uint32_t part = kPartsPerWord * threadIdx.x; part < num_parts; part += kPartsPerWord * kLookUpThreads) {
      const auto pack = LoadPack<kPartsPerWord>(workspace.codes, kNumBins + part);
      StorePack<kPartsPerWord>(parts_, Index(part >> (kBinShift - shift_), part), pack);
    }
    __syncthreads();
  }

  __device__ uint8_t operator[](uint32_t pattern) const {
    const uint32_t bin = bins_[pattern >> kBinShift];
    if (bin < kPlaces) return bin;
    return parts_[Index(bin - kPlaces, SlotOfPart(bin - kPlaces, pattern, shift_) - kNumBins)];
  }

 private:
  static constexpr uint16_t kPlaces = kNumCodes;  // What is larger is a place.
  static constexpr int kPartsPerWord = 4;

  static __device__ uint32_t Index(uint32_t place, uint32_t part) {
    return SpreadOverBanks(place, part / kPartsPerWord) * kPartsPerWord + part % kPartsPerWord;
  }

  uint16_t* const bins_;
  uint8_t* const parts_;
  const int shift_;
};

template <int kWidth, typename Codes>
__device__ void LookUpAll(const Codes& codes_of_patterns, const float* values, int64_t num_values, uint8_t* codes) {
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& patterns) {
    Pack<uint8_t, width> pack;
#pragma unroll
    for (int j = 0; j < width; ++j) pack.at[j] = codes_of_patterns[patterns.at[j]];
    StorePack<width>(codes, i, pack);
  });
}

template <int kWidth>
__global__ void __launch_bounds__(kLookUpThreads) LookUpCodes(const float* values, int64_t num_values, bool codes_fit,
                                                              const SketchWorkspace* workspace, uint8_t* codes) {
  WaitForPreviousKernel();
  extern __shared__ uint4 shared_memory[];
  if (!workspace->HasRefined()) {
    LookUpAll<kWidth>(CodesOfBins(shared_memory, *workspace), values, num_values, codes);
  } else if (codes_fit) {
    LookUpAll<kWidth>(CodesOfNearParts(shared_memory, *workspace), values, num_values, codes);
  } else {
    LookUpAll<kWidth>(CodesOfFarParts(shared_memory, *workspace), values, num_values, codes);
  }
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

// How much shared memory a block can have for its tables.
int SharedBytes(Enqueuer& enqueuer) {
  return enqueuer.DeviceAttribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() - kOtherSharedBytes;
}

// More of a bin's members, and it is refined.
uint32_t MostMembers(int64_t num_values) {
  return static_cast<uint32_t>(std::max<int64_t>(1, num_values / kRefineFraction));
}

void AssignCodes(const SketchSettings& settings, float* bucket_values, SketchWorkspace* workspace,
                 Enqueuer& enqueuer) {
  enqueuer.LaunchEarly(SumParts, {kRunBlocks, kListThreads}, settings, workspace);
  enqueuer.LaunchEarly(AssignKeys, {kListBlocks + kRunBlocks, kListThreads}, settings, workspace);
  enqueuer.LaunchEarly(WriteBuckets, {kNumCodes, kListThreads}, bucket_values, workspace);
}

template <int kWidth>
void EncodeSketch(Width<kWidth>, const float* values, const SketchSettings& settings, uint8_t* codes,
                  float* bucket_values, SketchWorkspace* workspace, Enqueuer& enqueuer) {
  const int64_t num_values = settings.num_values;
  const int shared_bytes = SharedBytes(enqueuer);
  const int num_exponents = std::clamp((shared_bytes - kHotSlotsBytes) / kBytesPerExponent, 1, kMaxExponents);
  const Grid count_grid = GridFor(enqueuer, num_values, kCountThreads, kCountBlocksPerMultiprocessor,
                                  kHotSlotsBytes + num_exponents * kBytesPerExponent);
  Grid part_grid = GridFor(enqueuer, num_values, kPartThreads, 1, shared_bytes);
  const uint32_t most_counters = PartCounters::MostCounters(shared_bytes);
  part_grid.num_blocks = std::max(part_grid.num_blocks, CeilDiv(kMaxParts, most_counters));  // One for each window.
  const bool codes_fit = shared_bytes >= CodesOfNearParts::kSharedBytes;
  const Grid look_up_grid = GridFor(enqueuer, num_values, kLookUpThreads, 1,
                                    codes_fit ? CodesOfNearParts::kSharedBytes : CodesOfBins::kSharedBytes);

  enqueuer.Launch(CountBins<kWidth>, count_grid, values, num_values, num_exponents, workspace);
  enqueuer.LaunchEarly(RefineBins, {kListBlocks, kListThreads}, MostMembers(num_values), settings, workspace);
  enqueuer.LaunchEarly(CountParts<kWidth>, part_grid, values, num_values, most_counters, workspace);
  AssignCodes(settings, bucket_values, workspace, enqueuer);
  enqueuer.LaunchEarly(LookUpCodes<kWidth>, look_up_grid, values, num_values, codes_fit, workspace, codes);
}

template <int kWidth, typename T>
void EncodeSketch(Width<kWidth>, const T* values, const SketchSettings& settings, uint8_t* codes,
                  float* bucket_values, SketchWorkspace* workspace, Enqueuer& enqueuer) {
  const int64_t num_values = settings.num_values;
  const int shared_bytes = SharedBytes(enqueuer);
  const Grid count_grid = GridFor(enqueuer, num_values, kHalfThreads, 1, shared_bytes);
  const Grid look_up_grid = GridFor(enqueuer, num_values, kHalfThreads, 1, kNumHalves * sizeof(uint8_t));

  enqueuer.Launch(CountHalves<kWidth, T>, count_grid, values, num_values, HalfWindow::MostMagnitudes(shared_bytes),
                  workspace);
  enqueuer.LaunchEarly(AddToBins<T>, {kHalfBlocks, kHalfThreads}, workspace);
  enqueuer.LaunchEarly(RefineBins, {kListBlocks, kListThreads}, MostMembers(num_values), settings, workspace);
  enqueuer.LaunchEarly(AddToParts<T>, {kHalfBlocks, kHalfThreads}, workspace);
  AssignCodes(settings, bucket_values, workspace, enqueuer);
  enqueuer.LaunchEarly(LookUpHalves<kWidth, T>, look_up_grid, values, num_values, workspace, codes);
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
  auto* const memory = static_cast<SketchWorkspace*>(workspace);
  enqueuer.Clear(memory, offsetof(SketchWorkspace, num_refined));
  WithType(values, type, [&](auto* typed) {
    WithWidth(IsAligned(typed) && IsAligned(codes), [&](auto width) {
      EncodeSketch(width, typed, {num_values, spacing}, codes, bucket_values, memory, enqueuer);
    });
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
