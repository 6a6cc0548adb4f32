// The quantile sketch of values of 16 bits. There are few enough that each can have a counter and a code: values are
// counted once, and bins and parts are added up from these counts.

#ifndef HOP_TF_OPS_CUDA_SKETCH_HALVES_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_HALVES_CUH_

#include <algorithm>
#include <cstdint>

#include "block_scan.cuh"
#include "packs.cuh"
#include "sketch_bins.cuh"
#include "sketch_count.cuh"

namespace hop_tf {
namespace {

constexpr int kHalfThreads = 1024;
constexpr int kHalfBlocks = kNumHalves / kHalfThreads;  // For a thread per value that 16 bits can mean.

constexpr uint32_t kHalfMagnitudes = kNumHalves / 2;

// Magnitudes that a block counts in shared memory. The number is the same for both signs.
struct HalfWindow {
  uint32_t first, size;

  // `headroom` is how many magnitudes may lie above the largest among a few.
  __device__ HalfWindow(uint32_t largest_sampled, uint32_t headroom, uint32_t size)
      : first(max(min(largest_sampled + headroom + 1, kHalfMagnitudes), size) - size), size(size) {}

  __device__ bool Contains(uint32_t half) const { return half % kHalfMagnitudes - first < size; }

  __device__ uint32_t CounterOf(uint32_t half) const {
    return half % kHalfMagnitudes - first + half / kHalfMagnitudes * size;
  }

  __device__ uint32_t HalfOf(uint32_t counter) const {
    return counter < size ? first + counter : kHalfMagnitudes + first + counter - size;
  }

  static uint32_t MostMagnitudes(int shared_bytes) {
    return std::min<uint32_t>(shared_bytes / sizeof(uint32_t) / 2, kHalfMagnitudes);
  }
};

template <int kWidth, typename T>
__global__ void __launch_bounds__(kHalfThreads)
    CountHalves(const T* values, int64_t num_values, uint32_t most_magnitudes, SketchWorkspace* workspace) {
  extern __shared__ uint32_t counters[];
  __shared__ uint32_t largest_sampled;
  if (threadIdx.x == 0) largest_sampled = 0;
  for (uint32_t i = threadIdx.x; i < 2 * most_magnitudes; i += kHalfThreads) counters[i] = 0;
  __syncthreads();
  const T sampled = Sample(values, num_values);
  const uint32_t sampled_magnitude = sampled.bits % kHalfMagnitudes;
  if (sampled_magnitude < T::kInfinity) atomicMax(&largest_sampled, sampled_magnitude);
  __syncthreads();
  const HalfWindow window(largest_sampled, kHeadroom << T::kMantissaBits, most_magnitudes);

  uint32_t zeros = 0;
  bool has_non_finite = false;
  const auto load = [&](auto width, int64_t i) { return LoadPack<width>(values, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t, const auto& pack) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const uint32_t half = pack.at[i].bits;
      if (half % kHalfMagnitudes == 0) {
        ++zeros;
      } else if (half % kHalfMagnitudes >= T::kInfinity) {
        has_non_finite = true;
      } else if (window.Contains(half)) {
        atomicAdd(&counters[window.CounterOf(half)], 1u);
      } else {
        atomicAdd(&workspace->members_of_half[half], 1u);
      }
    }
  });
  zeros = ScanBlock(zeros, Plus()).total;
  has_non_finite = __syncthreads_or(has_non_finite);
  if (threadIdx.x == 0 && zeros > 0) atomicAdd(&workspace->members_of_half[0], zeros);
  if (threadIdx.x == 0 && has_non_finite) workspace->has_non_finite = 1;
  for (uint32_t i = threadIdx.x; i < 2 * window.size; i += kHalfThreads) {
    if (counters[i] > 0) atomicAdd(&workspace->members_of_half[window.HalfOf(i)], counters[i]);
  }
}

// The value of the thread, and how often it occurs.
template <typename T>
struct HalfOfThread {
  uint32_t pattern, bin, members;

  __device__ explicit HalfOfThread(const SketchWorkspace& workspace) {
    const uint32_t half = blockIdx.x * kHalfThreads + threadIdx.x;
    pattern = ToPattern(T{static_cast<uint16_t>(half)});
    bin = pattern >> kBinShift;
    members = workspace.members_of_half[half];
  }

  // What they add to a slot whose members have the bits above `shift` in common.
  __device__ void AddTo(uint32_t slot, int shift, SketchWorkspace* workspace) const {
    workspace->AddToSlot(slot, members, static_cast<unsigned long long>(pattern % (1u << shift)) * members);
  }
};

template <typename T>
__global__ void __launch_bounds__(kHalfThreads) AddToBins(SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  const HalfOfThread<T> half(*workspace);
  if (half.members == 0) return;
  if ((half.pattern & kMagnitudeMask) < kSmallestNormal) {
    atomicAdd(&workspace->members[0], half.members);
  } else {
    half.AddTo(half.bin, kBinShift, workspace);
  }
}

template <typename T>
__global__ void __launch_bounds__(kHalfThreads) AddToParts(SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  if (!workspace->HasRefined()) return;
  const HalfOfThread<T> half(*workspace);
  if (half.members == 0 || !workspace->IsRefined(half.bin)) return;
  const int shift = workspace->PartShift();
  half.AddTo(SlotOfPart(workspace->place_of_bin[half.bin], half.pattern, shift), shift, workspace);
}

template <int kWidth, typename T>
__global__ void __launch_bounds__(kHalfThreads)
    LookUpHalves(const T* values, int64_t num_values, const SketchWorkspace* workspace, uint8_t* codes) {
  WaitForPreviousKernel();
  extern __shared__ Pack<uint8_t, kPackWidth> code_packs[];
  const bool has_non_finite = workspace->has_non_finite != 0, has_refined = workspace->HasRefined();
  const int part_shift = workspace->PartShift();
  const auto code_of = [&](uint32_t pattern) -> uint8_t {
    const uint32_t bin = pattern >> kBinShift;
    const uint32_t place = has_refined ? workspace->place_of_bin[bin] : kNotRefined;
    return workspace->codes[place == kNotRefined ? bin : SlotOfPart(place, pattern, part_shift)];
  };
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < kNumHalves / kPackWidth; i += kHalfThreads) {
    Pack<uint8_t, kPackWidth> pack = {};
#pragma unroll
    for (int j = 0; j < kPackWidth; ++j) {
      if (!has_non_finite) pack.at[j] = code_of(ToPattern(T{static_cast<uint16_t>(kPackWidth * i + j)}));
    }
    code_packs[i] = pack;
  }
  __syncthreads();

  const auto* const code_of_half = reinterpret_cast<const uint8_t*>(code_packs);
  const auto load = [&](auto width, int64_t i) { return LoadPack<width>(values, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& pack) {
    Pack<uint8_t, width> found;
#pragma unroll
    for (int j = 0; j < width; ++j) found.at[j] = code_of_half[pack.at[j].bits];
    StorePack<width>(codes, i, found);
  });
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_HALVES_CUH_
