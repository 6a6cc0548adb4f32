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
// A bin with more than this part of all values is refined, so that buckets begin within half of that of their rank. So
// there are fewer refined bins than this: they hold either two or more of fewer than 1000 values, or more than n / 500
// of n values each.
constexpr int kRefineFraction = 500;
// Refined bins have 2^16 parts together, but each at least 2^9.
constexpr int kMaxPartShift = 7;
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

}  // namespace hop_tf

#endif  // HOP_TF_OPS_KERNELS_CONSTANTS_H_
