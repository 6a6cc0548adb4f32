// The quantile sketch's second count: CountParts counts the members of the parts of refined bins.

#ifndef HOP_TF_OPS_CUDA_SKETCH_PARTS_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_PARTS_CUH_

#include <cstdint>

#include "block_scan.cuh"
#include "packs.cuh"
#include "sketch_bins.cuh"
#include "sketch_count.cuh"

namespace hop_tf {
namespace {

// One block per multiprocessor, with all its shared memory.
constexpr int kPartThreads = 1024;

__device__ inline uint32_t DivideUp(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The first parts of different bins would lie in the same bank of memory; they are frequent where values have few
// digits. Swaps indices among 32 neighbors, by the place of their bin.
__device__ inline uint32_t SpreadOverBanks(uint32_t place, uint32_t index) { return index ^ place % kWarpSize; }

// What a block of threads counts: those parts whose slots are in a window. Blocks with different windows read the same
// values, and those with the same window share the values.
struct PartWindow {
  uint32_t first_slot, num_slots;
  Worker thread;

  // There are at least as many blocks as windows.
  __device__ PartWindow(uint32_t most_slots, const SketchWorkspace& workspace) {
    const uint32_t num_parts = workspace.num_refined * PartsPerPlace(workspace.PartShift());
    const uint32_t num_windows = DivideUp(num_parts, most_slots), window = blockIdx.x % num_windows;
    num_slots = DivideUp(DivideUp(num_parts, num_windows), kWarpSize) * kWarpSize;
    first_slot = kNumBins + window * num_slots;
    thread.index = blockIdx.x / num_windows * int64_t{kPartThreads} + threadIdx.x;
    thread.num_workers = DivideUp(gridDim.x - window, num_windows) * int64_t{kPartThreads};
  }

  __device__ bool Contains(uint32_t slot) const { return slot - first_slot < num_slots; }
};

// A pattern that many of the sampled values have. The lanes of a warp would wait for each other to add to its counter,
// so each thread counts it for itself.
class FrequentPattern {
 public:
  // The whole block calls it, as it does Flush. 0 stands for none: it belongs to no refined bin.
  __device__ FrequentPattern(uint32_t pattern) : pattern_(pattern) {}

  // Counts the pattern if it is the frequent one; returns whether it is.
  __device__ bool Counts(uint32_t pattern) {
    if (pattern != pattern_) return false;
    ++num_members_;
    return true;
  }

  __device__ void Flush(const PartWindow& window, SketchWorkspace* workspace) const {
    if (pattern_ == 0) return;
    const int shift = workspace->PartShift();
    const uint32_t slot = SlotOfPart(workspace->place_of_bin[pattern_ >> kBinShift], pattern_, shift);
    if (!window.Contains(slot)) return;
    const uint32_t sum = ScanBlock(num_members_, Plus()).total;
    if (threadIdx.x == 0 && sum > 0) {
      workspace->AddToSlot(slot, sum, static_cast<unsigned long long>(pattern_ % (1u << shift)) * sum);
    }
  }

 private:
  const uint32_t pattern_;
  uint32_t num_members_ = 0;  // That the thread has counted.
};

// The counters of a window in shared memory. Each is one word, to which one addition counts a member and its low bits.
// Threads do not look whether these fit, because they would have to wait for each addition: Flush finds out.
class PartCounters {
 public:
  static uint32_t MostCounters(int shared_bytes) {
    return shared_bytes / sizeof(uint32_t) / kWarpSize * kWarpSize;  // SpreadOverBanks swaps so many neighbors.
  }

  // The whole block calls it, as it does Flush.
  __device__ PartCounters(const PartWindow& window, uint4* shared_memory, SketchWorkspace* workspace)
      : window_(window),
        workspace_(workspace),
        counters_(reinterpret_cast<uint32_t*>(shared_memory)),
        shift_(workspace->PartShift()) {
    for (uint32_t i = threadIdx.x; i < window_.num_slots; i += kPartThreads) counters_[i] = 0;
    __syncthreads();
  }

  template <int kWidth>
  __device__ void AddAll(const Pack<uint32_t, kWidth>& patterns, FrequentPattern& frequent) {
    uint32_t places[kWidth];  // Looked up together, because that takes a while.
#pragma unroll
    for (int i = 0; i < kWidth; ++i) places[i] = workspace_->place_of_bin[patterns.at[i] >> kBinShift];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (places[i] == kNotRefined || frequent.Counts(patterns.at[i])) continue;
      const uint32_t slot = SlotOfPart(places[i], patterns.at[i], shift_);
      if (window_.Contains(slot)) Add(slot, patterns.at[i]);
    }
  }

  // Adds the counts to the workspace. Returns false, and adds nothing, if a count was too large for its word.
  //
  // Low bits that do not fit become members, and members that do not fit are lost. So the sum of all low bits is smaller
  // than what the threads have added; or it is the same, and the sum of all members is smaller.
  __device__ bool Flush() {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < window_.num_slots; i += kPartThreads) {
      num_members_ -= counters_[i] / kMember;
      sum_of_low_bits_ -= counters_[i] % kMember;
    }
    if (ScanBlock(sum_of_low_bits_, Plus()).total != 0 || ScanBlock(num_members_, Plus()).total != 0) return false;
    for (uint32_t i = threadIdx.x; i < window_.num_slots; i += kPartThreads) {
      const uint32_t count = counters_[Word(i)];
      if (count != 0) workspace_->AddToSlot(window_.first_slot + i, count / kMember, count % kMember);
    }
    return true;
  }

 private:
  static constexpr uint32_t kMember = 1u << 20;

  __device__ uint32_t Word(uint32_t counter) const {
    return SpreadOverBanks(counter >> (kBinShift - shift_), counter);
  }

  __device__ void Add(uint32_t slot, uint32_t pattern) {
    const uint32_t low = pattern % (1u << shift_);
    atomicAdd(&counters_[Word(slot - window_.first_slot)], kMember + low);
    ++num_members_;
    sum_of_low_bits_ += low;
  }

  const PartWindow window_;
  SketchWorkspace* const workspace_;
  uint32_t* const counters_;
  const int shift_;
  uint32_t num_members_ = 0;  // That the thread has added, as the sum below.
  unsigned long long sum_of_low_bits_ = 0;
};

// What a block knows of repeated values in refined bins from a sample, which is the same for all blocks.
struct Repetition {
  uint32_t frequent_pattern;  // 0 if none is frequent.
  bool is_common;             // Without the frequent pattern.

  // The whole block calls it.
  __device__ Repetition(const float* values, int64_t num_values, const SketchWorkspace& workspace) {
    __shared__ unsigned long long highest_frequency;
    if (threadIdx.x == 0) highest_frequency = 0;
    __syncthreads();
    const uint32_t pattern = ToPattern(Sample(values, num_values));
    const unsigned num_equal = __popc(__match_any_sync(kAllLanes, pattern));
    const bool is_refined = workspace.IsRefined(pattern >> kBinShift);
    if (is_refined) atomicMax(&highest_frequency, static_cast<unsigned long long>(num_equal) << 32 | pattern);
    __syncthreads();
    frequent_pattern = highest_frequency >> 32 >= kWarpSize / 8 ? static_cast<uint32_t>(highest_frequency) : 0;
    // One in 16, as of 500 values that are equally frequent: a count of one of these may be too large for a word.
    const bool is_repeated = is_refined && num_equal > 1 && pattern != frequent_pattern;
    is_common = __syncthreads_count(is_repeated) > kPartThreads / 16;
  }
};

// Counts the parts of any window. Members and low bits have a word each, and many lanes can add 1 to a word at once.
template <int kWidth>
__device__ void CountRepeatedParts(const PartWindow& window, FrequentPattern frequent, const float* values,
                                   int64_t num_values, uint4* shared_memory, SketchWorkspace* workspace) {
  const SlotCounters counters(Window(), shared_memory, workspace);
  const int shift = workspace->PartShift();
  CountAll<kWidth, kPartThreads>(window.thread, values, num_values, counters, [&](uint32_t pattern) {
    const uint32_t place = workspace->place_of_bin[pattern >> kBinShift];
    if (place == kNotRefined || frequent.Counts(pattern)) return;
    const uint32_t slot = SlotOfPart(place, pattern, shift);
    if (window.Contains(slot)) counters.AddToSlot(slot, pattern % (1u << shift));
  });
  frequent.Flush(window, workspace);
}

template <int kWidth>
__global__ void __launch_bounds__(kPartThreads)
    CountParts(const float* values, int64_t num_values, uint32_t most_counters, SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  if (!workspace->HasRefined()) return;
  extern __shared__ uint4 shared_memory[];
  const Repetition repetition(values, num_values, *workspace);
  FrequentPattern frequent(repetition.frequent_pattern);
  if (repetition.is_common) {
    const PartWindow all_parts(kMaxParts, *workspace);
    return CountRepeatedParts<kWidth>(all_parts, frequent, values, num_values, shared_memory, workspace);
  }
  const PartWindow window(most_counters, *workspace);
  PartCounters counters(window, shared_memory, workspace);
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(window.thread, 0, num_values, load,
                   [&](auto, int64_t, const auto& patterns) { counters.AddAll(patterns, frequent); });
  if (counters.Flush()) return frequent.Flush(window, workspace);
  CountRepeatedParts<kWidth>(window, FrequentPattern(repetition.frequent_pattern), values, num_values, shared_memory,
                             workspace);
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_PARTS_CUH_
