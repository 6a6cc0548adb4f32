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
// digits. Swaps neighbors among 32; the swapped place of a swapped place is the place itself.
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
  __device__ void AddAll(const Pack<uint32_t, kWidth>& patterns) {
    uint32_t places[kWidth];  // Looked up together, because that takes a while.
#pragma unroll
    for (int i = 0; i < kWidth; ++i) places[i] = workspace_->place_of_bin[patterns.at[i] >> kBinShift];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t slot = SlotOfPart(places[i], patterns.at[i], shift_);
      if (places[i] != kNotRefined && window_.Contains(slot)) Add(slot, patterns.at[i]);
    }
  }

  // Adds the counts to the workspace. Returns false, and adds nothing, if a count was too large for its word.
  //
  // Low bits that do not fit become members, and members that do not fit are lost. Either makes the sum over all
  // counters smaller than what the threads have added.
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

// Whether a few values are so frequent that their counts would be too large for a word, and that additions to them
// would wait for each other: among sampled pairs, one in 128 is equal. The whole block calls it; all blocks find the
// same.
__device__ inline bool RepeatsValues(const float* values, int64_t num_values, const SketchWorkspace& workspace) {
  const uint32_t pattern = ToPattern(Sample(values, num_values));
  const bool is_equal = pattern == ShuffleUp(pattern, 1) && threadIdx.x % kWarpSize != 0;
  return __syncthreads_count(is_equal && workspace.IsRefined(pattern >> kBinShift)) > kPartThreads / 128;
}

// Counts the parts of any window. Members and low bits have a word each, and many lanes can add 1 to a word at once.
template <int kWidth>
__device__ void CountFrequentParts(const PartWindow& window, const float* values, int64_t num_values,
                                   uint4* shared_memory, SketchWorkspace* workspace) {
  const SlotCounters counters(Window(), shared_memory, workspace);
  const int shift = workspace->PartShift();
  CountAll<kWidth, kPartThreads>(window.thread, values, num_values, counters, [&](uint32_t pattern) {
    const uint32_t place = workspace->place_of_bin[pattern >> kBinShift];
    if (place == kNotRefined) return;
    const uint32_t slot = SlotOfPart(place, pattern, shift);
    if (window.Contains(slot)) counters.AddToSlot(slot, pattern % (1u << shift));
  });
}

template <int kWidth>
__global__ void __launch_bounds__(kPartThreads)
    CountParts(const float* values, int64_t num_values, uint32_t most_counters, SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  if (!workspace->HasRefined()) return;
  extern __shared__ uint4 shared_memory[];
  if (RepeatsValues(values, num_values, *workspace)) {
    const PartWindow all_parts(kMaxParts, *workspace);
    return CountFrequentParts<kWidth>(all_parts, values, num_values, shared_memory, workspace);
  }
  const PartWindow window(most_counters, *workspace);
  PartCounters counters(window, shared_memory, workspace);
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(window.thread, 0, num_values, load,
                   [&](auto, int64_t, const auto& patterns) { counters.AddAll(patterns); });
  if (counters.Flush()) return;
  CountFrequentParts<kWidth>(window, values, num_values, shared_memory, workspace);
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_PARTS_CUH_
