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

// The counters of a block of threads for parts, in shared memory. Blocks divide the parts into windows, one for each
// block, and those with different windows read the same values. A counter is one word, to which one addition counts a
// member and its low bits.
class PartCounters {
 public:
  static uint32_t MostCounters(int shared_bytes) {
    return shared_bytes / sizeof(uint32_t) / kWarpSize * kWarpSize;  // Word permutes so many neighbors.
  }

  // The whole block calls it, as it does Flush. There are at least as many blocks as windows.
  __device__ PartCounters(uint32_t most_counters, uint4* shared_memory, SketchWorkspace* workspace)
      : workspace_(workspace), counters_(reinterpret_cast<uint32_t*>(shared_memory)), shift_(workspace->PartShift()) {
    const uint32_t num_parts = workspace->num_refined * PartsPerPlace(shift_);
    num_windows_ = DivideUp(num_parts, most_counters);
    num_counters_ = DivideUp(DivideUp(num_parts, num_windows_), kWarpSize) * kWarpSize;
    first_slot_ = kNumBins + blockIdx.x % num_windows_ * num_counters_;
    for (uint32_t i = threadIdx.x; i < num_counters_; i += kPartThreads) counters_[i] = 0;
    __syncthreads();
  }

  // The thread among those of the blocks with the same window.
  __device__ Worker ThreadOfWindow() const {
    const int64_t num_blocks = DivideUp(gridDim.x - blockIdx.x % num_windows_, num_windows_);
    return {blockIdx.x / num_windows_ * int64_t{kPartThreads} + threadIdx.x, num_blocks * kPartThreads};
  }

  template <int kWidth>
  __device__ void AddAll(const Pack<uint32_t, kWidth>& patterns) const {
    uint32_t places[kWidth];  // Looked up together, because that takes a while.
#pragma unroll
    for (int i = 0; i < kWidth; ++i) places[i] = workspace_->place_of_bin[patterns.at[i] >> kBinShift];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (places[i] != kNotRefined) Add(places[i], patterns.at[i]);
    }
  }

  __device__ void Flush() const {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < num_counters_; i += kPartThreads) Move(i, counters_[Word(i)]);
  }

 private:
  static constexpr uint32_t kMember = 1u << 20;  // Low bits are below 2^kMaxPartShift.
  // A thread adds at most once before it sees that a counter is large, and moves what it holds.
  static constexpr uint32_t kLarge = 1u << 11;
  static_assert(kLarge + kPartThreads <= UINT32_MAX / kMember, "members have to fit");
  static_assert((kLarge + kPartThreads) << kMaxPartShift <= kMember, "low bits have to fit");

  static __device__ uint32_t DivideUp(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

  // The first parts of different bins would lie in the same bank of memory; they are frequent in float16's steps.
  static __device__ uint32_t Word(uint32_t counter) {
    return counter ^ (counter >> (kBinShift - kMaxPartShift)) % kWarpSize;
  }

  __device__ void Add(uint32_t place, uint32_t pattern) const {
    const uint32_t counter = SlotOfPart(place, pattern, shift_) - first_slot_;
    if (counter >= num_counters_) return;
    uint32_t* const word = &counters_[Word(counter)];
    const uint32_t before = atomicAdd(word, kMember + pattern % (1u << shift_));
    if (before >= kLarge * kMember) Move(counter, atomicExch(word, 0u));
  }

  __device__ void Move(uint32_t counter, uint32_t count) const {
    const uint32_t slot = first_slot_ + counter, low = count % kMember;
    if (count == 0) return;
    atomicAdd(&workspace_->members[slot], count / kMember);
    if (low != 0) atomicAdd(&workspace_->low_bits[slot], static_cast<unsigned long long>(low));
  }

  SketchWorkspace* const workspace_;
  uint32_t* const counters_;
  const int shift_;
  uint32_t num_windows_, num_counters_, first_slot_;
};

// Whether a few values are so frequent that additions to their counters would wait for each other: among sampled pairs,
// one in 16 is equal. The whole block calls it; all blocks find the same.
template <typename T>
__device__ bool RepeatsValues(const T* values, int64_t num_values, const SketchWorkspace& workspace) {
  const uint32_t pattern = SamplePattern(values, num_values);
  const bool is_equal = pattern == ShuffleUp(pattern, 1) && threadIdx.x % kWarpSize != 0;
  return __syncthreads_count(is_equal && workspace.IsRefined(pattern >> kBinShift)) > kPartThreads / 16;
}

template <int kWidth, typename T>
__global__ void __launch_bounds__(kPartThreads)
    CountParts(const T* values, int64_t num_values, uint32_t most_counters, SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  if (!workspace->HasRefined()) return;
  extern __shared__ uint4 shared_memory[];
  if (RepeatsValues(values, num_values, *workspace)) {
    // Hot counters count members apart: many lanes can add 1 to a word at once.
    const SlotCounters counters(Window(), shared_memory, workspace);
    const int shift = workspace->PartShift();
    CountAll<kWidth, kPartThreads>(values, num_values, counters, [&](uint32_t pattern) {
      const uint32_t place = workspace->place_of_bin[pattern >> kBinShift];
      if (place == kNotRefined) return;
      counters.AddToSlot(SlotOfPart(place, pattern, shift), pattern % (1u << shift));
    });
    return;
  }
  const PartCounters counters(most_counters, shared_memory, workspace);
  const auto load = [&](auto width, int64_t i) { return LoadPatterns<width>(values, i); };
  ForPacks<kWidth>(counters.ThreadOfWindow(), 0, num_values, load,
                   [&](auto, int64_t, const auto& patterns) { counters.AddAll(patterns); });
  counters.Flush();
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_PARTS_CUH_
