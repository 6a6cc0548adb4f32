// The quantile sketch's first step: CountBins counts the members of bins, most of them in shared memory.

#ifndef HOP_TF_OPS_CUDA_SKETCH_COUNT_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_COUNT_CUH_

#include <cstdint>

#include "block_scan.cuh"
#include "packs.cuh"
#include "sketch_bins.cuh"

namespace hop_tf {
namespace {

// Blocks per multiprocessor. With two, one counts while the other waits at a barrier.
constexpr int kCountBlocksPerMultiprocessor = 2;
constexpr int kCountThreads = 1024 / kCountBlocksPerMultiprocessor;

// Exponents that are counted in shared memory: at most 80 KiB, so that two blocks fit where memory allows it.
constexpr int kMaxExponents = 40;
// Exponents above the largest among a few values.
constexpr int kHeadroom = 4;

// Counters for the first slots that a block meets: frequent ones are among them.
constexpr int kHotSlotBits = 10;
constexpr uint32_t kHotSlots = 1u << kHotSlotBits;
constexpr int kHotSlotProbes = 4;

// Shared memory: members and low bits of each counter, and the slots that hot counters stand for.
constexpr int kBytesPerExponent = 2 * kBinsPerExponent * 2 * sizeof(uint32_t);
constexpr int kHotSlotsBytes = kHotSlots * 3 * sizeof(uint32_t);

// The bins that a block of threads counts in shared memory: those of neighboring exponents, for both signs. They
// belong to numbers that are normal and finite.
class Window {
 public:
  __device__ Window() : bins_per_sign_(0), first_bin_(0) {}

  __device__ Window(uint32_t largest_magnitude, int num_exponents)
      : bins_per_sign_(num_exponents * kBinsPerExponent) {
    const int last_exponent = min(static_cast<int>(largest_magnitude >> 23) + kHeadroom, 254);
    first_bin_ = max(last_exponent + 1 - num_exponents, 1) * kBinsPerExponent;
  }

  __device__ uint32_t NumCounters() const { return 2 * bins_per_sign_; }

  __device__ bool Contains(uint32_t pattern) const { return Place(pattern) < bins_per_sign_; }

  // The counter of a pattern that is inside.
  __device__ uint32_t CounterOf(uint32_t pattern) const {
    return Place(pattern) + (pattern >> 31) * bins_per_sign_;
  }

  __device__ uint32_t BinOf(uint32_t counter) const {
    return first_bin_ + (counter < bins_per_sign_ ? counter : kSignBin + counter - bins_per_sign_);
  }

 private:
  __device__ uint32_t Place(uint32_t pattern) const {
    return ((pattern & kMagnitudeMask) >> kBinShift) - first_bin_;
  }

  uint32_t bins_per_sign_;
  uint32_t first_bin_;
};

// The counters of a block of threads in shared memory: one for each bin of a window, and behind these, hot counters for
// other slots, first come, first served. Additions to slots without a counter go to device memory.
class SlotCounters {
 public:
  // The whole block calls it, as it does Spill and Flush.
  __device__ SlotCounters(const Window& window, uint4* shared_memory, SketchWorkspace* workspace)
      : window_(window), workspace_(workspace), members_(reinterpret_cast<uint32_t*>(shared_memory)) {
    const uint32_t num_words = 2 * NumCounters() + kHotSlots;
    for (uint32_t i = threadIdx.x; i < num_words * sizeof(uint32_t) / sizeof(uint4); i += blockDim.x) {
      shared_memory[i] = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
  }

  // `pattern` is inside the window.
  __device__ void AddToWindow(uint32_t pattern) const { AddToCounter(window_.CounterOf(pattern), pattern & kLowMask); }

  // `slot` is not 0.
  __device__ __forceinline__ void AddToSlot(uint32_t slot, uint32_t low) const {
    uint32_t hot = slot * 2654435769u >> (32 - kHotSlotBits);  // 2^32 divided by the golden ratio.
    for (int probe = 0; probe < kHotSlotProbes; ++probe, hot = (hot + 1) % kHotSlots) {
      uint32_t owner = HotSlots()[hot];
      if (owner == 0) owner = atomicCAS(&HotSlots()[hot], 0u, slot);
      if (owner == 0 || owner == slot) return AddToCounter(window_.NumCounters() + hot, low);
    }
    workspace_->AddToSlot(slot, 1, low);
  }

  // Moves large sums of low bits to device memory. A block may count this many values between two calls: then no
  // addition has to look for a carry.
  static constexpr uint32_t kLargeSum = 1u << 29;
  static constexpr uint32_t kMaxValuesUntilSpill = (UINT32_MAX - (kLargeSum - 1)) / kLowMask;

  __device__ void Spill() const {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < NumCounters(); i += blockDim.x) {
      if (LowBits()[i] < kLargeSum) continue;
      atomicAdd(&workspace_->low_bits[SlotOf(i)], static_cast<unsigned long long>(LowBits()[i]));
      LowBits()[i] = 0;
    }
    __syncthreads();
  }

  // Blocks begin at different counters, because additions to the same address wait for each other.
  __device__ void Flush() const {
    __syncthreads();
    const uint32_t start = NumCounters() / gridDim.x * blockIdx.x / kWarpSize * kWarpSize;
    for (uint32_t i = threadIdx.x; i < NumCounters(); i += blockDim.x) {
      const uint32_t counter = i + start < NumCounters() ? i + start : i + start - NumCounters();
      if (members_[counter] == 0) continue;
      workspace_->AddToSlot(SlotOf(counter), members_[counter], LowBits()[counter]);
    }
  }

 private:
  __device__ uint32_t NumCounters() const { return window_.NumCounters() + kHotSlots; }
  __device__ uint32_t* LowBits() const { return members_ + NumCounters(); }
  __device__ uint32_t* HotSlots() const { return members_ + 2 * NumCounters(); }

  __device__ uint32_t SlotOf(uint32_t counter) const {
    return counter < window_.NumCounters() ? window_.BinOf(counter) : HotSlots()[counter - window_.NumCounters()];
  }

  // Nothing waits for either addition.
  __device__ void AddToCounter(uint32_t counter, uint32_t low) const {
    atomicAdd(&members_[counter], 1u);
    if (low != 0) atomicAdd(&LowBits()[counter], low);
  }

  const Window window_;
  SketchWorkspace* const workspace_;
  uint32_t* const members_;
};

// Calls add(pattern) for the worker's share of the values. Spills the counters in time, and flushes them at the end.
template <int kWidth, int kThreads, typename Add>
__device__ void CountAll(const Worker& worker, const float* values, int64_t num_values, const SlotCounters& counters,
                         const Add& add) {
  constexpr int kValuesPerRound = kThreads * kValuesPerThread;
  // The last values, too few for a pack, come on top.
  constexpr int kRounds = (SlotCounters::kMaxValuesUntilSpill - kPackWidth) / kValuesPerRound;
  static_assert(kRounds > 0, "a round must not be too large");
  const int64_t num_between_spills = worker.num_workers / kThreads * kValuesPerRound * kRounds;
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  for (int64_t begin = 0; begin < num_values; begin += num_between_spills) {
    if (begin > 0) counters.Spill();
    const int64_t end = min(begin + num_between_spills, num_values);
    ForPacks<kWidth>(worker, begin, end, load, [&](auto width, int64_t, const auto& patterns) {
#pragma unroll
      for (int i = 0; i < width; ++i) add(patterns.at[i]);
    });
  }
  counters.Flush();
}

// The thread's value in a sample that covers the array with the threads of a block.
template <typename T>
__device__ T Sample(const T* values, int64_t num_values) {
  return values[threadIdx.x * num_values / blockDim.x];
}

// The lanes of a warp whose pattern is in the same bin, in the high half, and that bin. A whole warp calls it.
__device__ inline uint32_t FrequencyOfBin(uint32_t pattern) {
  const uint32_t bin = pattern >> kBinShift;
  return __popc(__match_any_sync(kAllLanes, bin)) << 16 | bin;
}

// The bin of the highest frequency, if it is so high that lanes would wait for each other to add to its counter.
// Otherwise, or if it is not in the window, no bin.
__device__ inline uint32_t FrequentBin(uint32_t frequency, const Window& window) {
  const uint32_t bin = frequency % (1u << 16);
  return frequency >> 16 >= kWarpSize / 4 && window.Contains(bin << kBinShift) ? bin : kNumBins;
}

template <int kWidth>
__global__ void __launch_bounds__(kCountThreads, kCountBlocksPerMultiprocessor)
    CountBins(const float* values, int64_t num_values, int num_exponents, SketchWorkspace* workspace) {
  extern __shared__ uint4 shared_memory[];
  __shared__ uint32_t largest_sampled, highest_frequency, num_zeros;
  if (threadIdx.x == 0) largest_sampled = highest_frequency = num_zeros = 0;
  __syncthreads();
  const uint32_t sampled = ToPattern(Sample(values, num_values)), sampled_magnitude = sampled & kMagnitudeMask;
  if (sampled_magnitude < kInfinity) atomicMax(&largest_sampled, sampled_magnitude);
  atomicMax(&highest_frequency, FrequencyOfBin(sampled));
  __syncthreads();
  const Window window(largest_sampled, num_exponents);
  const SlotCounters counters(window, shared_memory, workspace);
  const uint32_t frequent = FrequentBin(highest_frequency, window);

  uint32_t zeros = 0, frequent_members = 0;
  unsigned long long frequent_low_bits = 0;
  bool has_non_finite = false;
  CountAll<kWidth, kCountThreads>(ThreadOfGrid(), values, num_values, counters, [&](uint32_t pattern) {
    const uint32_t magnitude = pattern & kMagnitudeMask;
    if (pattern >> kBinShift == frequent) {
      ++frequent_members;
      frequent_low_bits += pattern & kLowMask;
    } else if (window.Contains(pattern)) {
      counters.AddToWindow(pattern);
    } else if (magnitude < kSmallestNormal) {
      ++zeros;
    } else if (magnitude < kInfinity) {
      counters.AddToSlot(pattern >> kBinShift, pattern & kLowMask);
    } else {
      has_non_finite = true;
    }
  });
  if (zeros > 0) atomicAdd(&num_zeros, zeros);
  has_non_finite = __syncthreads_or(has_non_finite);
  if (frequent < kNumBins) {
    frequent_members = ScanBlock(frequent_members, Plus()).total;
    frequent_low_bits = ScanBlock(frequent_low_bits, Plus()).total;
    if (threadIdx.x == 0) workspace->AddToSlot(frequent, frequent_members, frequent_low_bits);
  }
  if (threadIdx.x != 0) return;
  if (num_zeros > 0) atomicAdd(&workspace->members[0], num_zeros);
  if (has_non_finite) workspace->has_non_finite = 1;
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_COUNT_CUH_
