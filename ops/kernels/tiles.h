// The inner loops: functions over a tile, few enough values to stay in a core's first cache. Each is compiled for several
// instruction sets; the processor's is chosen when the library is loaded.

#ifndef HOP_TF_OPS_KERNELS_TILES_H_
#define HOP_TF_OPS_KERNELS_TILES_H_

#include <cstdint>

#include "hop_tf_kernels.h"

namespace hop_tf {

constexpr int kTileValues = 1024;

// Widens values of any type to float32 patterns. For float32 itself it copies.
void LoadTile(const void* values, HopTfType type, int64_t begin, int count, float* tile);

// The largest magnitude, as a pattern: patterns of magnitudes are ordered like the magnitudes, nan above infinity.
uint32_t MaxMagnitudeBits(const void* floats, int64_t count);

// The number of magnitudes that no normal number has. They count as zero.
int CountZeros(const void* floats, int count);

// Copies patterns, and spreads what counts as zero over bins of such magnitudes. An addition to a counter then need not
// wait for the one before.
void SpreadZeros(const void* floats, int count, uint32_t* patterns);

// codes = round(values * inverse_scale).
void QuantizeTile(const void* floats, int64_t count, float inverse_scale, int8_t* codes);

// floats = codes * scale.
void DequantizeTile(const int8_t* codes, int64_t count, float scale, void* floats);

// sums = values + codes * scale; `sums` may be `values`.
void AddDequantizedTile(const int8_t* codes, int64_t count, float scale, const void* values, void* sums);

// Upper halves of patterns.
void TruncateTile(const void* floats, int64_t count, void* halves);
void RoundTile(const void* floats, int64_t count, void* halves);
void WidenTile(const void* halves, int64_t count, void* floats);

// sums += what `WidenTile` gives.
void AddWidenedTile(const void* halves, int64_t count, void* sums);

// Blocks of few bits: see HopTfFewBitsEncode. A tile begins with a block; its last block may be shorter.
void EncodeBits4Tile(const void* floats, int count, int block_size, void* scales, uint8_t* codes);
void EncodeBits2Tile(const void* floats, int count, int block_size, void* scales, uint8_t* codes);
void DecodeBits4Tile(const void* scales, const uint8_t* codes, int count, int block_size, void* floats);
void DecodeBits2Tile(const void* scales, const uint8_t* codes, int count, int block_size, void* floats);

// sums = values + tile; `sums` may be `values`.
void AddTile(const float* tile, int count, const void* values, void* sums);

// Writes first + i, for each i with a value whose pattern without the sign, as a number, is at least `bound`. Returns
// how many there are. `indices` has room for `count`.
int64_t SelectLarge16(const void* values, int64_t count, int64_t bound, int64_t first, int64_t* indices);
int64_t SelectLarge32(const void* values, int64_t count, int64_t bound, int64_t first, int64_t* indices);
int64_t SelectLarge64(const void* values, int64_t count, int64_t bound, int64_t first, int64_t* indices);

// The instruction set that the functions above were chosen for.
const char* InstructionSet();

}  // namespace hop_tf

#endif  // HOP_TF_OPS_KERNELS_TILES_H_
