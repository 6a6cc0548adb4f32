#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "constants.h"
#include "float_bits.h"

#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && !defined(HOP_TF_SINGLE_VERSION)
#define HOP_TF_MULTIVERSION __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define HOP_TF_MULTIVERSION
#endif

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

HOP_TF_MULTIVERSION uint32_t SpreadZeros(const void* floats, int count, uint32_t* patterns) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = Load<uint32_t>(floats, i);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const uint32_t zero = (static_cast<uint32_t>(i) % kNumZeroBins) << 16;
    largest = std::max(largest, magnitude);
    patterns[i] = magnitude < kSmallestNormal ? zero : bits;
  }
  return largest;
}

HOP_TF_MULTIVERSION void QuantizeTile(const void* floats, int64_t count, float inverse_scale, int8_t* codes) {
  for (int64_t i = 0; i < count; ++i) {
    const float rounded = Load<float>(floats, i) * inverse_scale + kRounder;
    codes[i] = static_cast<int8_t>(static_cast<uint8_t>(ToBits(rounded)));
  }
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
