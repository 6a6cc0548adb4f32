// What the encodings are made of, for processors and for GPUs alike. fallback.py has the same in Python.

#ifndef HOP_TF_OPS_KERNELS_CONSTANTS_H_
#define HOP_TF_OPS_KERNELS_CONSTANTS_H_

#include <cstdint>

namespace hop_tf {

// Patterns of float32.
constexpr uint32_t kMagnitudeMask = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kSmallestNormal = 0x00800000u;  // 2^-126

// The sketch. A code is a byte.
constexpr int kNumCodes = 256;
// A bin is what values have in common above so many bits.
constexpr int kBinShift = 16;
constexpr uint32_t kNumBins = 1u << (32 - kBinShift);
constexpr uint32_t kLowMask = (1u << kBinShift) - 1;
constexpr uint32_t kSignBin = kNumBins / 2;
constexpr uint32_t kFirstNormalBin = kSmallestNormal >> kBinShift;
constexpr uint32_t kInfinityBin = kInfinity >> kBinShift;
// A bin with more than this part of all values is refined, so that buckets begin within half of that of their rank. So
// there are fewer refined bins than this: they hold either two or more of fewer than 1000 values, or more than n / 500
// of n values each.
constexpr int kRefineFraction = 500;
// All refined bins together have no more parts than this, so that their counters fit into a GPU's shared memory.
constexpr uint32_t kMaxParts = 32768u;
// The values of a part differ in this many bits at most.
constexpr int kMaxPartShift = 10;
static_assert(kRefineFraction << (kBinShift - kMaxPartShift) <= kMaxParts, "the parts of all refined bins have to fit");
// Values that cannot be told apart and that are worth more buckets than this get one of their own.
constexpr int kPointBuckets = 4;

// 8-bit blocks.
constexpr float kLargestCode = 127.0f;
// Below this a scale would be no normal number.
constexpr uint32_t kSmallestMagnitude = 0x04000000u;  // 2^-119
// Times 127 it is still finite.
constexpr float kLargestScale = 0x1.020406p121f;
// Adding this to a float of at most 2^22 in magnitude leaves its nearest integer, ties to even, in the lowest bits.
constexpr float kRounder = 0x1.8p23f;

// Few bits. Scales are bfloat16.
constexpr uint32_t kLargestHalf = 0x7f7fu;
constexpr uint32_t kNanHalf = 0x7fc0u;
// The 16 levels of 4 bits, in 1/64 of the scale: the products are exact in float32. Neighbors are odd and even in turn,
// so that a multiple of 1/64 is never in the middle of two: it is nearer to the upper one if it exceeds the bound.
constexpr int kNumLevels = 16;
constexpr float kLevelsPerScale = 64.0f;
constexpr float kLevels[kNumLevels] = {-55.0f / 64, -42.0f / 64, -31.0f / 64, -22.0f / 64, -15.0f / 64, -8.0f / 64,
                                       -3.0f / 64,  0.0f,        3.0f / 64,   8.0f / 64,   13.0f / 64,  20.0f / 64,
                                       29.0f / 64,  38.0f / 64,  51.0f / 64,  1.0f};
constexpr int8_t kLevelBounds[kNumLevels - 1] = {-49, -37, -27, -19, -12, -6, -2, 1, 5, 10, 16, 24, 33, 44, 57};
// Magnitudes for 2 bits are multiples of the largest one over this: sums over a block are exact in 32 bits.
constexpr float kMagnitudeUnits = 32768.0f;

}  // namespace hop_tf

#endif  // HOP_TF_OPS_KERNELS_CONSTANTS_H_
