#include "tiles.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "constants.h"
#include "float_bits.h"

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && !defined(HOP_TF_SINGLE_VERSION)
#define HOP_TF_MULTIVERSION __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define HOP_TF_MULTIVERSION
#endif
// Part of each version of the function that calls it.
#define HOP_TF_INLINE __attribute__((always_inline)) inline

namespace hop_tf {
namespace {

HOP_TF_MULTIVERSION void WidenHalves(const void* halves, int64_t begin, int count, float* tile) {
  for (int i = 0; i < count; ++i) tile[i] = FromBits(HalfToFloatBits(Load<uint16_t>(halves, begin + i)));
}

}  // namespace

void LoadTile(const void* values, HopTfType type, int64_t begin, int count, float* tile) {
  const char* bytes = static_cast<const char*>(values);
  switch (type) {
    case HOP_TF_FLOAT32:
      std::memcpy(tile, bytes + begin * 4, count * 4);
      break;
    case HOP_TF_BFLOAT16:
      WidenTile(bytes + begin * 2, count, tile);
      break;
    case HOP_TF_FLOAT16:
      WidenHalves(values, begin, count, tile);
      break;
  }
}

HOP_TF_MULTIVERSION uint32_t MaxMagnitudeBits(const void* floats, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, Load<uint32_t>(floats, i) & kMagnitudeMask);
  return largest;
}

HOP_TF_MULTIVERSION int CountZeros(const void* floats, int count) {
  int num_zeros = 0;
  for (int i = 0; i < count; ++i) num_zeros += (Load<uint32_t>(floats, i) & kMagnitudeMask) < kSmallestNormal;
  return num_zeros;
}

HOP_TF_MULTIVERSION void SpreadZeros(const void* floats, int count, uint32_t* patterns) {
  constexpr uint32_t kNumSpread = 16;
  static_assert(kNumSpread <= kFirstNormalBin);
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = Load<uint32_t>(floats, i);
    const uint32_t zero = (static_cast<uint32_t>(i) % kNumSpread) << kBinShift;
    patterns[i] = (bits & kMagnitudeMask) < kSmallestNormal ? zero : bits;
  }
}

namespace {

HOP_TF_INLINE void Quantize(const void* floats, int64_t count, float inverse_scale, int8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = Load<float>(floats, i) * inverse_scale + kRounder;
    codes[i] = static_cast<int8_t>(static_cast<uint8_t>(ToBits(rounded)));
  }
}

}  // namespace

HOP_TF_MULTIVERSION void QuantizeTile(const void* floats, int64_t count, float inverse_scale, int8_t* codes) {
  Quantize(floats, count, inverse_scale, codes);
}

HOP_TF_MULTIVERSION void DequantizeTile(const int8_t* codes, int64_t count, float scale, void* floats) {
  for (int64_t i = 0; i < count; ++i) Store<float>(floats, i, static_cast<float>(codes[i]) * scale);
}

HOP_TF_MULTIVERSION void AddDequantizedTile(const int8_t* codes, int64_t count, float scale, const void* values,
                                            void* sums) {
  for (int64_t i = 0; i < count; ++i) {
    Store<float>(sums, i, Load<float>(values, i) + static_cast<float>(codes[i]) * scale);
  }
}

HOP_TF_MULTIVERSION void TruncateTile(const void* floats, int64_t count, void* halves) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = Load<uint32_t>(floats, i);
    // What tells a nan from infinity may be in the lower half only.
    const uint32_t quiet = (bits & kMagnitudeMask) > kInfinity ? 0x00400000u : 0u;
    Store<uint16_t>(halves, i, static_cast<uint16_t>((bits | quiet) >> 16));
  }
}

HOP_TF_MULTIVERSION void RoundTile(const void* floats, int64_t count, void* halves) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = Load<uint32_t>(floats, i);
    const uint32_t to_even = 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t rounded = (bits & kMagnitudeMask) > kInfinity ? bits | 0x00400000u : bits + to_even;
    Store<uint16_t>(halves, i, static_cast<uint16_t>(rounded >> 16));
  }
}

HOP_TF_MULTIVERSION void WidenTile(const void* halves, int64_t count, void* floats) {
  for (int64_t i = 0; i < count; ++i) {
    Store<uint32_t>(floats, i, static_cast<uint32_t>(Load<uint16_t>(halves, i)) << 16);
  }
}

HOP_TF_MULTIVERSION void AddWidenedTile(const void* halves, int64_t count, void* sums) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = FromBits(static_cast<uint32_t>(Load<uint16_t>(halves, i)) << 16);
    Store<float>(sums, i, Load<float>(sums, i) + value);
  }
}

namespace {

// The nearest bfloat16 to a finite magnitude, ties to even; no larger than the largest finite one.
HOP_TF_INLINE uint32_t RoundedHalf(uint32_t magnitude) {
  return std::min((magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16, kLargestHalf);
}

// Packs codes of `kBits` bits, the first into the lowest bits of a byte. Behind the last code are zeros.
template <int kBits>
HOP_TF_INLINE void Pack(uint8_t* codes, int count, uint8_t* packed) {
  constexpr int kPerByte = 8 / kBits;
  const int num_bytes = (count + kPerByte - 1) / kPerByte;
  std::fill(codes + count, codes + num_bytes * kPerByte, uint8_t{0});
  for (int i = 0; i < num_bytes; ++i) {
    uint32_t byte = 0;
    for (int j = 0; j < kPerByte; ++j) byte |= static_cast<uint32_t>(codes[i * kPerByte + j]) << (j * kBits);
    packed[i] = static_cast<uint8_t>(byte);
  }
}

// Writes up to 3 codes more than `count`, all of the last byte.
template <int kBits>
HOP_TF_INLINE void Unpack(const uint8_t* packed, int count, uint8_t* codes) {
  constexpr int kPerByte = 8 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const int num_bytes = (count + kPerByte - 1) / kPerByte;
  for (int i = 0; i < num_bytes; ++i) {
    for (int j = 0; j < kPerByte; ++j) codes[i * kPerByte + j] = (packed[i] >> (j * kBits)) & kMask;
  }
}

// Returns the bfloat16 scale of a block: its value of largest magnitude, the positive one of two equal ones.
HOP_TF_INLINE uint32_t SignedScale(const void* block, int count) {
  uint32_t magnitude = 0;
  int32_t largest = INT32_MIN;  // As integers, patterns of positive values lie above those of negative ones.
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = Load<uint32_t>(block, i);
    magnitude = std::max(magnitude, bits & kMagnitudeMask);
    largest = std::max(largest, static_cast<int32_t>(bits));
  }
  if (magnitude >= kInfinity) return kNanHalf;
  if (magnitude < kSmallestMagnitude) return 0;
  const uint32_t sign = largest == static_cast<int32_t>(magnitude) ? 0u : 0x8000u;
  return RoundedHalf(magnitude) | sign;
}

// The codes of multiples, from -64 to 64, of 1/64 of the scale: how many midpoints of levels lie below each.
HOP_TF_INLINE void NearestLevels(const int8_t* multiples, int count, uint8_t* codes) {
  for (int i = 0; i < count; ++i) {
    uint8_t code = 0;
    for (int k = 0; k < kNumLevels - 1; ++k) code += multiples[i] > kLevelBounds[k];
    codes[i] = code;
  }
}

}  // namespace

HOP_TF_MULTIVERSION void EncodeBits4Tile(const void* floats, int count, int block_size, void* scales, uint8_t* codes) {
  int8_t multiples[kTileValues];
  uint8_t unpacked[kTileValues];
  for (int begin = 0; begin < count; begin += block_size) {
    const void* block = At(static_cast<const float*>(floats), begin);
    const int size = std::min(block_size, count - begin);
    const uint32_t scale = SignedScale(block, size);
    Store<uint16_t>(scales, begin / block_size, static_cast<uint16_t>(scale));
    if (scale == 0 || scale == kNanHalf) {
      std::fill_n(multiples + begin, size, int8_t{0});
    } else {
      Quantize(block, size, kLevelsPerScale / FromBits(scale << 16), multiples + begin);
    }
  }
  NearestLevels(multiples, count, unpacked);
  Pack<4>(unpacked, count, codes);
}

HOP_TF_MULTIVERSION void DecodeBits4Tile(const void* scales, const uint8_t* codes, int count, int block_size,
                                         void* floats) {
  uint8_t unpacked[kTileValues];
  Unpack<4>(codes, count, unpacked);
  for (int begin = 0; begin < count; begin += block_size) {
    const int end = std::min(begin + block_size, count);
    const float scale = FromBits(static_cast<uint32_t>(Load<uint16_t>(scales, begin / block_size)) << 16);
    for (int i = begin; i < end; ++i) Store<float>(floats, i, kLevels[unpacked[i]] * scale);
  }
}

namespace {

// Sums and numbers of magnitudes up to a bound, and above it.
struct Split {
  int64_t lower, num_lower, upper, num_upper;

  // The integer part of the middle between both means. A part that is empty has none.
  int32_t Middle() const {
    if (num_lower == 0 || num_upper == 0) return static_cast<int32_t>((lower + upper) / (num_lower + num_upper));
    return static_cast<int32_t>((lower * num_upper + upper * num_lower) / (2 * num_lower * num_upper));
  }
};

HOP_TF_INLINE Split SplitAt(const int32_t* magnitudes, int count, int32_t bound) {
  int32_t total = 0, upper = 0, num_upper = 0;
  for (int i = 0; i < count; ++i) {
    total += magnitudes[i];
    upper += magnitudes[i] > bound ? magnitudes[i] : 0;
    num_upper += magnitudes[i] > bound ? 1 : 0;
  }
  return {total - upper, count - num_upper, upper, num_upper};
}

// The scale for the mean of magnitudes in units; 0 if there are none.
HOP_TF_INLINE uint32_t MeanScale(int64_t sum, int64_t count, double unit) {
  const double mean = count ? static_cast<double>(sum) / static_cast<double>(count) * unit : 0.0;
  return mean < FromBits(kSmallestMagnitude) ? 0u : RoundedHalf(ToBits(static_cast<float>(mean)));
}

// Magnitudes in units of 1/kUnits of the largest one.
HOP_TF_INLINE void QuantizeMagnitudes(const void* block, int count, float largest, int32_t* magnitudes) {
  const float inverse = kMagnitudeUnits / 256.0f / largest;  // Of no magnitude it is subnormal, or infinite.
  for (int i = 0; i < count; ++i) {
    const float magnitude = FromBits(Load<uint32_t>(block, i) & kMagnitudeMask);
    magnitudes[i] = static_cast<int32_t>(ToBits(magnitude * inverse * 256.0f + kRounder) - ToBits(kRounder));
  }
}

// Encodes a block whose largest magnitude is neither too small nor infinite.
HOP_TF_INLINE void EncodeBits2Block(const void* block, int count, float largest, uint16_t* scales, uint8_t* codes) {
  int32_t magnitudes[kTileValues];
  QuantizeMagnitudes(block, count, largest, magnitudes);
  const int32_t mean = SplitAt(magnitudes, count, INT32_MAX).Middle();
  const int32_t middle = SplitAt(magnitudes, count, mean).Middle();
  const Split split = SplitAt(magnitudes, count, middle);
  const double unit = static_cast<double>(largest) / kMagnitudeUnits;
  scales[0] = static_cast<uint16_t>(MeanScale(split.lower, split.num_lower, unit));
  scales[1] = static_cast<uint16_t>(MeanScale(split.upper, split.num_upper, unit));
  for (int i = 0; i < count; ++i) {
    const uint32_t sign = Load<float>(block, i) < 0.0f ? 2u : 0u;
    codes[i] = static_cast<uint8_t>(sign | (magnitudes[i] > middle ? 1u : 0u));
  }
}

}  // namespace

HOP_TF_MULTIVERSION void EncodeBits2Tile(const void* floats, int count, int block_size, void* scales, uint8_t* codes) {
  uint8_t unpacked[kTileValues];
  for (int begin = 0; begin < count; begin += block_size) {
    const void* block = At(static_cast<const float*>(floats), begin);
    const int size = std::min(block_size, count - begin);
    uint32_t largest = 0;
    for (int i = 0; i < size; ++i) largest = std::max(largest, Load<uint32_t>(block, i) & kMagnitudeMask);
    uint16_t both[2] = {};
    if (largest >= kSmallestMagnitude && largest < kInfinity) {
      EncodeBits2Block(block, size, FromBits(largest), both, unpacked + begin);
    } else {
      if (largest >= kInfinity) both[0] = both[1] = kNanHalf;
      std::fill_n(unpacked + begin, size, uint8_t{0});
    }
    for (int i = 0; i < 2; ++i) Store<uint16_t>(scales, 2 * (begin / block_size) + i, both[i]);
  }
  Pack<2>(unpacked, count, codes);
}

HOP_TF_MULTIVERSION void DecodeBits2Tile(const void* scales, const uint8_t* codes, int count, int block_size,
                                         void* floats) {
  uint8_t unpacked[kTileValues];
  Unpack<2>(codes, count, unpacked);
  for (int begin = 0; begin < count; begin += block_size) {
    const int end = std::min(begin + block_size, count);
    const uint32_t lower = static_cast<uint32_t>(Load<uint16_t>(scales, 2 * (begin / block_size))) << 16;
    const uint32_t upper = static_cast<uint32_t>(Load<uint16_t>(scales, 2 * (begin / block_size) + 1)) << 16;
    for (int i = begin; i < end; ++i) {
      const uint32_t code = unpacked[i];
      Store<uint32_t>(floats, i, (code & 1u ? upper : lower) ^ ((code & 2u) << 30));
    }
  }
}

HOP_TF_MULTIVERSION void AddTile(const float* tile, int count, const void* values, void* sums) {
  for (int i = 0; i < count; ++i) Store<float>(sums, i, Load<float>(values, i) + tile[i]);
}

namespace {

constexpr int kGroup = 16;  // Values looked at together: few groups have one, if one value in 100 is large.

template <typename T>
HOP_TF_INLINE int64_t SelectLarge(const void* values, int64_t count, T bound, int64_t first, int64_t* indices) {
  constexpr T kMask = std::numeric_limits<T>::max();
  int64_t number = 0;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const int64_t end = std::min<int64_t>(begin + kGroup, count);
    if (end - begin == kGroup) {
      T any = 0;
      for (int i = 0; i < kGroup; ++i) any |= (Load<T>(values, begin + i) & kMask) >= bound ? T{1} : T{0};
      if (!any) continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      Store<int64_t>(indices, number, first + i);
      number += (Load<T>(values, i) & kMask) >= bound;
    }
  }
  return number;
}

}  // namespace

HOP_TF_MULTIVERSION int64_t SelectLarge16(const void* values, int64_t count, int64_t bound, int64_t first,
                                          int64_t* indices) {
  return SelectLarge<int16_t>(values, count, static_cast<int16_t>(bound), first, indices);
}

HOP_TF_MULTIVERSION int64_t SelectLarge32(const void* values, int64_t count, int64_t bound, int64_t first,
                                          int64_t* indices) {
  return SelectLarge<int32_t>(values, count, static_cast<int32_t>(bound), first, indices);
}

HOP_TF_MULTIVERSION int64_t SelectLarge64(const void* values, int64_t count, int64_t bound, int64_t first,
                                          int64_t* indices) {
  return SelectLarge<int64_t>(values, count, bound, first, indices);
}

const char* InstructionSet() {
#if defined(__x86_64__)
#if defined(__clang__) || defined(HOP_TF_SINGLE_VERSION)
  return "x86-64";
#else
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
  return "x86-64";
#endif
#elif defined(__aarch64__)
  return "aarch64";
#else
  return "generic";
#endif
}

}  // namespace hop_tf
