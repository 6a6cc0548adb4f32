#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "checks.h"
#include "constants.h"
#include "float_bits.h"
#include "hop_tf_kernels.h"
#include "parallel.h"
#include "tiles.h"

namespace hop_tf {
namespace {

constexpr int64_t kMinValuesPerThread = 1 << 19;

struct Scale {
  float scale;
  float inverse;
};

Scale ScaleOf(uint32_t largest_magnitude) {
  if (largest_magnitude >= kInfinity) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
  if (largest_magnitude < kSmallestMagnitude) return {0.0f, 0.0f};
  const float largest = FromBits(largest_magnitude);
  return {std::min(largest / kLargestCode, kLargestScale), kLargestCode / largest};
}

// Gives the values to encode, in tiles: `Get(begin, count, tile)` returns where `count` values lie as float32, in memory
// of the source or in `tile`.
struct FloatSource {
  const void* values;
  const void* Get(int64_t begin, int, float*) const { return static_cast<const char*>(values) + begin * 4; }
};

struct ConvertedSource {
  const void* values;
  HopTfType type;
  const void* Get(int64_t begin, int count, float* tile) const {
    LoadTile(values, type, begin, count, tile);
    return tile;
  }
};

// values + codes * scale. A tile never crosses the end of a block.
template <typename Source>
struct SumSource {
  Source values;
  const int8_t* codes;
  const float* scales;
  int64_t block_size;
  const void* Get(int64_t begin, int count, float* tile) const {
    AddDequantizedTile(codes + begin, count, Load<float>(scales, begin / block_size), values.Get(begin, count, tile), tile);
    return tile;
  }
};

// Calls body(begin, count) for the tiles of [begin, end).
template <typename Body>
void ForTiles(int64_t begin, int64_t end, const Body& body) {
  for (; begin < end; begin += kTileValues) body(begin, static_cast<int>(std::min<int64_t>(end - begin, kTileValues)));
}

template <typename Source>
uint32_t MaxMagnitude(const Source& source, int64_t begin, int64_t end) {
  float tile[kTileValues];
  uint32_t largest = 0;
  ForTiles(begin, end, [&](int64_t first, int count) {
    largest = std::max(largest, MaxMagnitudeBits(source.Get(first, count, tile), count));
  });
  return largest;
}

void QuantizeOrZero(const void* values, int count, float inverse_scale, int8_t* codes) {
  if (inverse_scale == 0.0f) {
    std::fill_n(codes, count, int8_t{0});
  } else {
    QuantizeTile(values, count, inverse_scale, codes);
  }
}

template <typename Source>
void Quantize(const Source& source, int64_t begin, int64_t end, float inverse_scale, int8_t* codes) {
  float tile[kTileValues];
  ForTiles(begin, end, [&](int64_t first, int count) {
    QuantizeOrZero(source.Get(first, count, tile), count, inverse_scale, codes + first);
  });
}

// Encodes one block; returns its scale. What fits into a tile is fetched once.
template <typename Source>
float EncodeBlock(const Source& source, int64_t begin, int64_t end, int8_t* codes) {
  if (end - begin > kTileValues) {
    const Scale scale = ScaleOf(MaxMagnitude(source, begin, end));
    Quantize(source, begin, end, scale.inverse, codes);
    return scale.scale;
  }
  float tile[kTileValues];
  const int count = static_cast<int>(end - begin);
  const void* values = source.Get(begin, count, tile);
  const Scale scale = ScaleOf(MaxMagnitudeBits(values, count));
  QuantizeOrZero(values, count, scale.inverse, codes + begin);
  return scale.scale;
}

// Encodes the only block, with several threads.
template <typename Source>
float EncodeTogether(const Source& source, int64_t num_values, int8_t* codes, int num_parts) {
  std::vector<uint32_t> largest(num_parts, 0);
  ParallelFor(num_values, num_parts, kTileValues, [&](int part, int64_t begin, int64_t end) {
    largest[part] = MaxMagnitude(source, begin, end);
  });
  const Scale scale = ScaleOf(*std::max_element(largest.begin(), largest.end()));
  ParallelFor(num_values, num_parts, kTileValues,
              [&](int, int64_t begin, int64_t end) { Quantize(source, begin, end, scale.inverse, codes); });
  return scale.scale;
}

template <typename Source>
void EncodeBlocks(const Source& source, int64_t num_values, int64_t block_size, int8_t* codes, float* scales,
                  int num_threads) {
  const int num_parts = NumParts(num_values, kMinValuesPerThread, num_threads);
  if (block_size >= num_values && num_parts > 1) {
    Store(scales, 0, EncodeTogether(source, num_values, codes, num_parts));
    return;
  }
  ParallelFor(num_values, num_parts, block_size, [&](int, int64_t begin, int64_t end) {
    for (; begin < end; begin += block_size) {
      Store(scales, begin / block_size, EncodeBlock(source, begin, std::min(begin + block_size, end), codes));
    }
  });
}

// Calls body(begin, count, scale) for each block.
template <typename Body>
void ForBlocks(int64_t num_values, int64_t block_size, const float* scales, int num_threads, const Body& body) {
  // A block may be as large as the whole array: parts are not made of whole blocks.
  const int num_parts = NumParts(num_values, kMinValuesPerThread, num_threads);
  ParallelFor(num_values, num_parts, kTileValues, [&](int, int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t block = begin / block_size;
      const int64_t block_end = std::min((block + 1) * block_size, end);
      body(begin, block_end - begin, Load<float>(scales, block));
      begin = block_end;
    }
  });
}

bool AreValid(int64_t num_values, int64_t block_size) {
  return IsSize(num_values) && block_size >= 1 && IsSize(block_size);
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfInt8Encode(const void* values, HopTfType type, int64_t num_values, int64_t block_size, int8_t* codes,
                            float* scales, int num_threads) {
  if (!AreValid(num_values, block_size) || !IsType(type)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    if (type == HOP_TF_FLOAT32) {
      EncodeBlocks(FloatSource{values}, num_values, block_size, codes, scales, num_threads);
    } else {
      EncodeBlocks(ConvertedSource{values, type}, num_values, block_size, codes, scales, num_threads);
    }
  });
}

HopTfStatus HopTfInt8Decode(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                            float* values, int num_threads) {
  if (!AreValid(num_values, block_size)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    ForBlocks(num_values, block_size, scales, num_threads, [&](int64_t begin, int64_t count, float scale) {
      DequantizeTile(codes + begin, count, scale, At(values, begin));
    });
  });
}

HopTfStatus HopTfInt8Accumulate(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                                float* accumulator, int num_threads) {
  if (!AreValid(num_values, block_size)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    ForBlocks(num_values, block_size, scales, num_threads, [&](int64_t begin, int64_t count, float scale) {
      AddDequantizedTile(codes + begin, count, scale, At(accumulator, begin), At(accumulator, begin));
    });
  });
}

HopTfStatus HopTfInt8Reduce(const int8_t* codes, const float* scales, const void* values, HopTfType type,
                            int64_t num_values, int64_t block_size, int8_t* out_codes, float* out_scales,
                            int num_threads) {
  if (!AreValid(num_values, block_size) || !IsType(type)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    if (type == HOP_TF_FLOAT32) {
      const SumSource<FloatSource> sum{{values}, codes, scales, block_size};
      EncodeBlocks(sum, num_values, block_size, out_codes, out_scales, num_threads);
    } else {
      const SumSource<ConvertedSource> sum{{values, type}, codes, scales, block_size};
      EncodeBlocks(sum, num_values, block_size, out_codes, out_scales, num_threads);
    }
  });
}
