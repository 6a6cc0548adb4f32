// The quantile sketch's first steps: CountBins counts the members of bins, in shared memory where most values lie;
// RefineBins and CountParts do the same for the parts of those that hold too many.

#ifndef HOP_TF_OPS_CUDA_SKETCH_COUNT_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_COUNT_CUH_

#include <cstdint>

#include "block_scan.cuh"
#include "packs.cuh"
#include "sketch_bins.cuh"

namespace hop_tf {
namespace {

constexpr int kCountThreads = 512;
constexpr int kPartThreads = 256;

// What a multiprocessor holds at once.
constexpr int kCountBlocksPerMultiprocessor = 2;

// Exponents that are counted in shared memory: at most 80 KiB, so that two blocks fit where memory allows it.
constexpr int kMaxExponents = 40;
constexpr int kBytesPerExponent = 2 * kBinsPerExponent * 2 * sizeof(uint32_t);
// Exponents above the largest among a few values.
constexpr int kHeadroom = 4;

// The bins that a block of threads counts in shared memory: those of neighboring exponents, for both signs.
class Window {
 public:
  __device__ Window(uint32_t largest_magnitude, int num_exponents)
      : bins_per_sign_(num_exponents * kBinsPerExponent) {
    const int last_exponent = min(static_cast<int>(largest_magnitude >> 23) + kHeadroom, 254);
    first_bin_ = max(last_exponent + 1 - num_exponents, 1) * kBinsPerExponent;
  }

  __device__ uint32_t NumCounters() const { return 2 * bins_per_sign_; }

  // A bin's counter; NumCounters() or more for bins outside.
  __device__ uint32_t CounterOf(uint32_t bin) const {
    const uint32_t place = bin % kSignBin - first_bin_;
    return place < bins_per_sign_ ? place + bin / kSignBin * bins_per_sign_ : NumCounters();
  }

  __device__ uint32_t BinOf(uint32_t counter) const {
    return first_bin_ + (counter < bins_per_sign_ ? counter : kSignBin + counter - bins_per_sign_);
  }

 private:
  uint32_t bins_per_sign_;
  uint32_t first_bin_;
};

// A value's magnitude, from a sample that covers the array with the threads of a block; 0 if it is not finite.
template <typename T>
__device__ uint32_t SampleMagnitude(const T* values, int64_t num_values) {
  const uint32_t magnitude = ToPattern(values[threadIdx.x * num_values / blockDim.x]) & kMagnitudeMask;
  return magnitude < kInfinity ? magnitude : 0;
}

// Adds a member to a slot in device memory. Those lanes of the warp that add to the same one do it together, because
// where many values are equal, additions to one address would have to wait for each other.
__device__ __noinline__ void AddTogether(uint32_t slot, uint32_t low, int num_low_bits, SketchWorkspace* workspace) {
  const unsigned active = __activemask();
  const unsigned same_slot = __match_any_sync(active, slot);
  uint32_t sum = 0;
  for (int i = 0; i < num_low_bits; ++i) {
    sum += __popc(__ballot_sync(active, low >> i & 1u) & same_slot) << i;
  }
  if (static_cast<int>(threadIdx.x % kWarpSize) != __ffs(same_slot) - 1) return;
  atomicAdd(&workspace->members[slot], static_cast<uint32_t>(__popc(same_slot)));
  if (sum != 0) atomicAdd(&workspace->low_bits[slot], static_cast<unsigned long long>(sum));
}

struct BinCounters {
  Window window;
  uint32_t* members;   // In shared memory, as are ...
  uint32_t* low_bits;  // ... the lower 32 bits of these sums.
  SketchWorkspace* workspace;

  // `pattern` is neither a zero nor a denormal, and finite.
  __device__ void Add(uint32_t pattern) const {
    const uint32_t bin = pattern >> kBinShift, low = pattern & kLowMask, counter = window.CounterOf(bin);
    if (counter < window.NumCounters()) {
      atomicAdd(&members[counter], 1u);
      if (low != 0 && atomicAdd(&low_bits[counter], low) > UINT32_MAX - low) {
        atomicAdd(&workspace->low_bits[bin], 1ull << 32);
      }
    } else {
      AddTogether(bin, low, kBinShift, workspace);
    }
  }

  // The whole block calls it.
  __device__ void Flush() const {
    for (uint32_t i = threadIdx.x; i < window.NumCounters(); i += blockDim.x) {
      if (members[i] == 0) continue;
      const uint32_t bin = window.BinOf(i);
      atomicAdd(&workspace->members[bin], members[i]);
      atomicAdd(&workspace->low_bits[bin], static_cast<unsigned long long>(low_bits[i]));
    }
  }
};

template <int kWidth, typename T>
__global__ void __launch_bounds__(kCountThreads, kCountBlocksPerMultiprocessor)
    CountBins(const T* values, int64_t num_values, int num_exponents, SketchWorkspace* workspace) {
  extern __shared__ uint4 shared_memory[];
  __shared__ uint32_t largest_sampled, num_zeros;
  if (threadIdx.x == 0) largest_sampled = num_zeros = 0;
  __syncthreads();
  atomicMax(&largest_sampled, SampleMagnitude(values, num_values));
  __syncthreads();
  const Window window(largest_sampled, num_exponents);
  auto* const members = reinterpret_cast<uint32_t*>(shared_memory);
  for (uint32_t i = threadIdx.x; i < 2 * window.NumCounters(); i += blockDim.x) members[i] = 0;
  __syncthreads();

  const BinCounters counters = {window, members, members + window.NumCounters(), workspace};
  uint32_t zeros = 0, largest = 0;
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t, const auto& patterns) {
#pragma unroll
    for (int i = 0; i < width; ++i) {
      const uint32_t magnitude = patterns.at[i] & kMagnitudeMask;
      largest = max(largest, magnitude);
      if (magnitude < kSmallestNormal) {
        ++zeros;
      } else if (magnitude < kInfinity) {
        counters.Add(patterns.at[i]);
      }
    }
  });
  atomicAdd(&num_zeros, zeros);
  const bool has_non_finite = __syncthreads_or(largest >= kInfinity);
  counters.Flush();
  if (threadIdx.x == 0) atomicAdd(&workspace->members[0], num_zeros);
  if (threadIdx.x == 0 && has_non_finite) workspace->has_non_finite = 1;
}

// Chooses the bins to refine: those with more members than `most`.
__global__ void __launch_bounds__(kListThreads) RefineBins(uint32_t most, SketchWorkspace* workspace) {
  const uint32_t bin = BinAt(blockIdx.x * kListThreads + threadIdx.x);
  const uint32_t members = workspace->members[bin];
  const bool is_refined = bin != 0 && members > most;
  workspace->place_of_bin[bin] =
      is_refined ? static_cast<uint16_t>(atomicAdd(&workspace->num_refined, 1u) + 1) : uint16_t{0};
  const int num_occupied = __syncthreads_count(members > 0 && !is_refined);
  const int num_refined = __syncthreads_count(is_refined);
  if (threadIdx.x == 0) {
    workspace->num_occupied[blockIdx.x] = num_occupied;
    workspace->num_refined_of_block[blockIdx.x] = num_refined;
  }
}

template <int kWidth, typename T>
__global__ void __launch_bounds__(kPartThreads)
    CountParts(const T* values, int64_t num_values, SketchWorkspace* workspace) {
  if (!workspace->HasRefined()) return;
  const int part_shift = workspace->PartShift();
  const uint32_t low_mask = (1u << part_shift) - 1;
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t, const auto& patterns) {
    for (int i = 0; i < width; ++i) {
      const uint32_t pattern = patterns.at[i];
      const uint32_t place = workspace->place_of_bin[pattern >> kBinShift];
      if (place == 0) continue;
      AddTogether(SlotOfPart(place, pattern, part_shift), pattern & low_mask, part_shift, workspace);
    }
  });
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_COUNT_CUH_
