#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "float_bits.h"
#include "hop_tf_kernels.h"
#include "parallel.h"
#include "tiles.h"

namespace hop_tf {
namespace {

constexpr int64_t kMinValuesPerThread = 1 << 18;

// How the blocks of a number of bits are encoded, and where a tile's scales and codes lie.
struct Format {
  int bits;
  int block_size;

  int num_scales() const { return bits == 4 ? 1 : 2; }
  int tile_values() const { return kTileValues / block_size * block_size; }
  const uint16_t* ScalesAt(const uint16_t* scales, int64_t begin) const {
    return static_cast<const uint16_t*>(At(scales, begin / block_size * num_scales()));
  }
  uint16_t* ScalesAt(uint16_t* scales, int64_t begin) const {
    return static_cast<uint16_t*>(At(scales, begin / block_size * num_scales()));
  }
  int64_t CodesBefore(int64_t begin) const { return begin * bits / 8; }

  void Encode(const void* floats, int count, uint16_t* scales, uint8_t* codes) const {
    (bits == 4 ? EncodeBits4Tile : EncodeBits2Tile)(floats, count, block_size, scales, codes);
  }
  void Decode(const uint16_t* scales, const uint8_t* codes, int count, void* floats) const {
    (bits == 4 ? DecodeBits4Tile : DecodeBits2Tile)(scales, codes, count, block_size, floats);
  }
};

// Calls body(begin, count) for tiles of whole blocks, on several threads.
template <typename Body>
void ForTiles(int64_t num_values, const Format& format, int num_threads, const Body& body) {
  const int tile_values = format.tile_values();
  ParallelFor(num_values, NumParts(num_values, kMinValuesPerThread, num_threads), tile_values,
              [&](int, int64_t begin, int64_t end) {
                for (; begin < end; begin += tile_values) {
                  body(begin, static_cast<int>(std::min<int64_t>(end - begin, tile_values)));
                }
              });
}

const void* FloatsAt(const void* values, HopTfType type, int64_t begin, int count, float* tile) {
  if (type == HOP_TF_FLOAT32) return At(static_cast<const float*>(values), begin);
  LoadTile(values, type, begin, count, tile);
  return tile;
}

bool AreValid(int64_t num_values, int64_t block_size, int bits) {
  return IsSize(num_values) && block_size >= 8 && block_size <= kTileValues && block_size % 8 == 0 &&
         (bits == 2 || bits == 4);
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfFewBitsEncode(const void* values, HopTfType type, int64_t num_values, int64_t block_size, int bits,
                               uint16_t* scales, uint8_t* codes, int num_threads) {
  if (!AreValid(num_values, block_size, bits) || !IsType(type)) return HOP_TF_INVALID_ARGUMENT;
  const Format format{bits, static_cast<int>(block_size)};
  return Guarded([&] {
    ForTiles(num_values, format, num_threads, [&](int64_t begin, int count) {
      float tile[kTileValues];
      format.Encode(FloatsAt(values, type, begin, count, tile), count, format.ScalesAt(scales, begin),
                    codes + format.CodesBefore(begin));
    });
  });
}

HopTfStatus HopTfFewBitsDecode(const uint16_t* scales, const uint8_t* codes, int64_t num_values, int64_t block_size,
                               int bits, float* values, int num_threads) {
  if (!AreValid(num_values, block_size, bits)) return HOP_TF_INVALID_ARGUMENT;
  const Format format{bits, static_cast<int>(block_size)};
  return Guarded([&] {
    ForTiles(num_values, format, num_threads, [&](int64_t begin, int count) {
      format.Decode(format.ScalesAt(scales, begin), codes + format.CodesBefore(begin), count, At(values, begin));
    });
  });
}

HopTfStatus HopTfFewBitsAccumulate(const uint16_t* scales, const uint8_t* codes, int64_t num_values,
                                   int64_t block_size, int bits, float* accumulator, int num_threads) {
  if (!AreValid(num_values, block_size, bits)) return HOP_TF_INVALID_ARGUMENT;
  const Format format{bits, static_cast<int>(block_size)};
  return Guarded([&] {
    ForTiles(num_values, format, num_threads, [&](int64_t begin, int count) {
      float tile[kTileValues];
      format.Decode(format.ScalesAt(scales, begin), codes + format.CodesBefore(begin), count, tile);
      AddTile(tile, count, At(accumulator, begin), At(accumulator, begin));
    });
  });
}

HopTfStatus HopTfFewBitsReduce(const uint16_t* scales, const uint8_t* codes, const void* values, HopTfType type,
                               int64_t num_values, int64_t block_size, int bits, uint16_t* out_scales,
                               uint8_t* out_codes, int num_threads) {
  if (!AreValid(num_values, block_size, bits) || !IsType(type)) return HOP_TF_INVALID_ARGUMENT;
  const Format format{bits, static_cast<int>(block_size)};
  return Guarded([&] {
    ForTiles(num_values, format, num_threads, [&](int64_t begin, int count) {
      float tile[kTileValues], sums[kTileValues];
      format.Decode(format.ScalesAt(scales, begin), codes + format.CodesBefore(begin), count, tile);
      AddTile(tile, count, FloatsAt(values, type, begin, count, sums), sums);
      format.Encode(sums, count, format.ScalesAt(out_scales, begin), out_codes + format.CodesBefore(begin));
    });
  });
}
