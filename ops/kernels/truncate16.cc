#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "float_bits.h"
#include "hop_tf_kernels.h"
#include "parallel.h"
#include "tiles.h"

namespace hop_tf {
namespace {

constexpr int64_t kMinValuesPerThread = 1 << 19;

void EncodePart(const void* values, HopTfType type, int64_t begin, int64_t end, bool round, uint16_t* halves) {
  float tile[kTileValues];
  for (; begin < end; begin += kTileValues) {
    const int count = static_cast<int>(std::min<int64_t>(end - begin, kTileValues));
    const void* floats = At(static_cast<const float*>(values), begin);
    if (type != HOP_TF_FLOAT32) {
      LoadTile(values, type, begin, count, tile);
      floats = tile;
    }
    (round ? RoundTile : TruncateTile)(floats, count, At(halves, begin));
  }
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfTruncate16Encode(const void* values, HopTfType type, int64_t num_values, int round_to_nearest,
                                  uint16_t* halves, int num_threads) {
  if (!IsSize(num_values) || !IsType(type)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    ParallelFor(num_values, NumParts(num_values, kMinValuesPerThread, num_threads), kTileValues,
                [&](int, int64_t begin, int64_t end) {
                  EncodePart(values, type, begin, end, round_to_nearest != 0, halves);
                });
  });
}

HopTfStatus HopTfTruncate16Decode(const uint16_t* halves, int64_t num_values, float* values, int num_threads) {
  if (!IsSize(num_values)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    ParallelFor(num_values, NumParts(num_values, kMinValuesPerThread, num_threads), kTileValues,
                [&](int, int64_t begin, int64_t end) {
                  WidenTile(At(halves, begin), end - begin, At(values, begin));
                });
  });
}

HopTfStatus HopTfTruncate16Accumulate(const uint16_t* halves, int64_t num_values, float* accumulator,
                                      int num_threads) {
  if (!IsSize(num_values)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    ParallelFor(num_values, NumParts(num_values, kMinValuesPerThread, num_threads), kTileValues,
                [&](int, int64_t begin, int64_t end) {
                  AddWidenedTile(At(halves, begin), end - begin, At(accumulator, begin));
                });
  });
}
