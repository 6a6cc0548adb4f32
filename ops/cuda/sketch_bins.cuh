// The quantile sketch's bins, and the device memory that its steps share.

#ifndef HOP_TF_OPS_CUDA_SKETCH_BINS_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_BINS_CUH_

#include <cstdint>

#include "packs.cuh"

namespace hop_tf {

constexpr uint32_t kBinsPerExponent = 1u << (23 - kBinShift);  // For each sign.

constexpr uint32_t kMaxParts = kRefineFraction << (kBinShift - kMaxPartShift);

// Bins, and behind them parts, have slots: places in arrays.
constexpr uint32_t kNumSlots = kNumBins + kMaxParts;

// Bins are listed in the order of the values, one by each thread of so many blocks.
constexpr int kListThreads = 1024;
constexpr int kListBlocks = kNumBins / kListThreads;

// A bin, or a part of a refined one.
struct alignas(8) Entry {
  uint32_t pattern;  // What the members have in common; low bits 0.
  uint32_t slot;
};

struct SketchWorkspace {
  // Zero at first.
  uint32_t num_refined;
  uint32_t has_non_finite;
  uint32_t members[kNumSlots];  // There are fewer than 2^31 values, but the sum of their low bits needs more.
  unsigned long long low_bits[kNumSlots];

  // Written before they are read.
  uint32_t num_entries;
  // For each block of RefineBins: bins that have members but are not refined, and those that are.
  uint32_t num_occupied[kListBlocks];
  uint32_t num_refined_of_block[kListBlocks];
  // A refined bin's place among them, from 1, in no particular order; 0 for the others.
  uint16_t place_of_bin[kNumBins];
  uint32_t bin_of_place[kRefineFraction];
  uint32_t first_entry_of_place[kRefineFraction];
  Entry entries[kNumSlots];  // In the order of the values.
  uint8_t keys[kNumSlots];   // Of each entry; they rise. Entries with the same key get the same code.
  uint32_t first_entry_of_key[kNumCodes + 1];
  uint8_t key_has_members[kNumCodes];
  alignas(16) uint8_t codes[kNumSlots];

  __device__ bool HasRefined() const { return num_refined > 0 && has_non_finite == 0; }

  // The values of a part have in common what is above so many bits.
  __device__ int PartShift() const {
    int shift = 0;
    while (1u << shift < num_refined && shift < kMaxPartShift) ++shift;
    return shift;
  }
};

// How many slots a place takes.
__device__ inline uint32_t PartsPerPlace(int part_shift) { return 1u << (kBinShift - part_shift); }

// The slot of the first part at a place.
__device__ inline uint32_t SlotOfPlace(uint32_t place, int part_shift) {
  return kNumBins + (place - 1) * PartsPerPlace(part_shift);
}

__device__ inline uint32_t SlotOfPart(uint32_t place, uint32_t pattern, int part_shift) {
  return SlotOfPlace(place, part_shift) + ((pattern & kLowMask) >> part_shift);
}

// The bin that is `position`th in the order of the values.
__device__ inline uint32_t BinAt(uint32_t position) {
  return position < kSignBin ? kNumBins - 1 - position : position - kSignBin;
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_BINS_CUH_
