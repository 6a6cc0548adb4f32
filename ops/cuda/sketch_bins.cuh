// The quantile sketch's bins, and the device memory that its steps share.

#ifndef HOP_TF_OPS_CUDA_SKETCH_BINS_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_BINS_CUH_

#include <cstdint>

#include "block_scan.cuh"
#include "packs.cuh"

namespace hop_tf {

constexpr uint32_t kBinsPerExponent = 1u << (23 - kBinShift);  // For each sign.

// Bins, and behind them parts, have slots: places in arrays.
constexpr uint32_t kNumSlots = kNumBins + kMaxParts;

constexpr uint16_t kNotRefined = UINT16_MAX;

constexpr uint32_t kNumHalves = 1u << 16;

// A block of threads handles this many bins that are neighbors in the order of the values, one per thread.
constexpr int kListThreads = 1024;
constexpr int kListBlocks = kNumBins / kListThreads;

// A bin, or a part of a refined one.
struct alignas(8) Entry {
  uint32_t pattern;  // What the members have in common; low bits 0.
  uint32_t slot;
};

// The codes that entries ask for.
struct Demand {
  double share;     // Of the buckets.
  uint32_t counts;  // Points, which take a code each and may cut a bucket in two, and occupied entries; see below.

  static constexpr uint32_t kOccupied = 1, kPoint = 1u << 24;

  __device__ int NumOccupied() const { return static_cast<int>(counts % kPoint); }
  __device__ int NumPoints() const { return static_cast<int>(counts / kPoint); }
};

__device__ inline Demand operator+(const Demand& a, const Demand& b) {
  return {a.share + b.share, a.counts + b.counts};
}

__device__ inline Demand ShuffleUp(const Demand& demand, int distance) {
  return {ShuffleUp(demand.share, distance), ShuffleUp(demand.counts, distance)};
}

static_assert(kNumSlots < Demand::kPoint && kNumCodes / kPointBuckets < 256, "both counts have to fit");

// How many slots a place takes.
__device__ inline uint32_t PartsPerPlace(int part_shift) { return 1u << (kBinShift - part_shift); }

// A block of threads handles a run of parts that are neighbors in the order of the values.
__device__ inline uint32_t RunsPerPlace(int part_shift) {
  return (PartsPerPlace(part_shift) + kListThreads - 1) / kListThreads;
}

// Places that are not divided have a run each, and the parts of the others are no more than those of one bin.
constexpr uint32_t kMaxRuns = kRefineFraction;
static_assert(kMaxRuns >= (1u << kBinShift) / kListThreads, "runs of few places have to fit");

struct SketchWorkspace {
  // Zero at first.
  uint32_t has_non_finite;
  uint32_t num_entries_of_key[kNumCodes];
  uint32_t members_of_half[kNumHalves];  // Of each finite value of 16 bits, if values are so short.
  uint32_t members[kNumSlots];  // There are fewer than 2^31 values, but the sum of their low bits needs more.
  unsigned long long low_bits[kNumSlots];
  alignas(16) uint8_t codes[kNumSlots];

  // Written before they are read.
  uint32_t num_refined;
  alignas(16) uint16_t place_of_bin[kNumBins];  // A refined bin's place among them in the order of the values, or kNotRefined.
  uint32_t bin_of_place[kRefineFraction];
  Demand demand_of_block[kListBlocks];  // Of the bins that are not refined.
  Demand demand_of_run[kMaxRuns];
  Entry entries[kNumSlots];  // Those with members, in the order of the values and so of their keys.

  __device__ void AddToSlot(uint32_t slot, uint32_t added_members, unsigned long long added_low_bits) {
    atomicAdd(&members[slot], added_members);
    if (added_low_bits != 0) atomicAdd(&low_bits[slot], added_low_bits);
  }

  __device__ bool HasRefined() const { return num_refined > 0 && has_non_finite == 0; }

  __device__ bool IsRefined(uint32_t bin) const { return place_of_bin[bin] != kNotRefined; }

  // The values of a part have in common what is above so many bits.
  __device__ int PartShift() const {
    int shift = 0;
    while (num_refined * PartsPerPlace(shift) > kMaxParts) ++shift;
    return shift;
  }

  __device__ uint32_t NumRuns() const { return num_refined * RunsPerPlace(PartShift()); }
};

// The slot of the first part at a place.
__device__ inline uint32_t SlotOfPlace(uint32_t place, int part_shift) {
  return kNumBins + place * PartsPerPlace(part_shift);
}

__device__ inline uint32_t SlotOfPart(uint32_t place, uint32_t pattern, int part_shift) {
  return SlotOfPlace(place, part_shift) + ((pattern & kLowMask) >> part_shift);
}

// The bin that is `position`th in the order of the values.
__device__ inline uint32_t BinAt(uint32_t position) {
  return position < kSignBin ? kNumBins - 1 - position : position - kSignBin;
}

__device__ inline uint32_t PositionOf(uint32_t bin) {
  return bin < kSignBin ? bin + kSignBin : kNumBins - 1 - bin;
}

// What kernels that start early begin with. The next kernel may then start early, too, and wait here.
__device__ inline void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_BINS_CUH_
