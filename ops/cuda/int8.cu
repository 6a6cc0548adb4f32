// 8-bit blocks. A warp encodes a block that fits into its registers. Longer blocks are cut into chunks: one launch
// finds the largest magnitude of each block, a second quantizes, a third writes the scales.

#include <algorithm>
#include <cstdint>

#include "../kernels/constants.h"
#include "block_scan.cuh"
#include "enqueuer.h"
#include "packs.cuh"

namespace hop_tf {
namespace {

constexpr int kNumThreads = 256;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kWarpsPerBlock = kNumThreads / kWarpSize;

// What a warp keeps in registers.
constexpr int kValuesPerLane = 32;
constexpr int64_t kMaxValuesOfWarp = kValuesPerLane * kWarpSize;

constexpr int64_t kMaxValuesOfChunk = 1 << 14;

struct Scale {
  float scale;
  float inverse;
};

__device__ Scale ScaleOf(uint32_t largest_magnitude) {
  if (largest_magnitude >= kInfinity) return {__uint_as_float(kNan), 0.0f};
  if (largest_magnitude < kSmallestMagnitude) return {0.0f, 0.0f};
  const float largest = __uint_as_float(largest_magnitude);
  return {fminf(__fdiv_rn(largest, kLargestCode), kLargestScale), __fdiv_rn(kLargestCode, largest)};
}

__device__ int8_t Quantize(float value, float inverse_scale) {
  const float rounded = __fadd_rn(__fmul_rn(value, inverse_scale), kRounder);
  return inverse_scale == 0.0f ? 0 : static_cast<int8_t>(__float_as_uint(rounded) & 0xffu);
}

__device__ float Dequantize(int8_t code, float scale) { return __fmul_rn(static_cast<float>(code), scale); }

__device__ uint32_t Magnitude(float value) { return __float_as_uint(value) & kMagnitudeMask; }

template <int kWidth>
__device__ uint32_t MaxMagnitude(const Pack<float, kWidth>& pack) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) largest = max(largest, Magnitude(pack.at[i]));
  return largest;
}

template <int kWidth>
__device__ void StoreQuantized(const Pack<float, kWidth>& pack, float inverse_scale, int8_t* codes, int64_t index) {
  Pack<int8_t, kWidth> quantized;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) quantized.at[i] = Quantize(pack.at[i], inverse_scale);
  StorePack<kWidth>(codes, index, quantized);
}

// Gives the values to encode, as float32.
template <typename T>
struct PlainSource {
  const T* values;

  bool IsAlignedToPacks() const { return IsAligned(values); }

  template <int kWidth>
  __device__ Pack<float, kWidth> Load(int64_t index, int64_t) const {
    const Pack<uint32_t, kWidth> patterns = LoadPatterns<kWidth>(values, index);
    Pack<float, kWidth> floats;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) floats.at[i] = __uint_as_float(patterns.at[i]);
    return floats;
  }
};

// values + codes * scales[block]. What is loaded may be overwritten later by the thread that loaded it.
template <typename T>
struct SumSource {
  PlainSource<T> plain;
  const int8_t* codes;
  const float* scales;

  bool IsAlignedToPacks() const { return plain.IsAlignedToPacks() && IsAligned(codes); }

  template <int kWidth>
  __device__ Pack<float, kWidth> Load(int64_t index, int64_t block) const {
    Pack<float, kWidth> sums = plain.template Load<kWidth>(index, block);
    const Pack<int8_t, kWidth> pack = LoadPack<kWidth>(codes, index);
    const float scale = scales[block];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sums.at[i] = __fadd_rn(sums.at[i], Dequantize(pack.at[i], scale));
    return sums;
  }
};

// Short blocks.

// Encodes one block of at most kMaxValuesOfWarp values, a multiple of `kWidth`. The whole warp calls it.
template <int kWidth, typename Source>
__device__ void EncodeBlock(const Source& source, int64_t block, int64_t begin, int count, int8_t* codes,
                            float* scales) {
  constexpr int kNumPacks = kValuesPerLane / kWidth;
  const int lane = threadIdx.x % kWarpSize;
  Pack<float, kWidth> packs[kNumPacks];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kNumPacks; ++i) {
    const int place = (i * kWarpSize + lane) * kWidth;
    if (place < count) packs[i] = source.template Load<kWidth>(begin + place, block);
  }
#pragma unroll
  for (int i = 0; i < kNumPacks; ++i) {
    if ((i * kWarpSize + lane) * kWidth < count) largest = max(largest, MaxMagnitude<kWidth>(packs[i]));
  }
  const Scale scale = ScaleOf(MaxOfWarp(largest));
#pragma unroll
  for (int i = 0; i < kNumPacks; ++i) {
    const int place = (i * kWarpSize + lane) * kWidth;
    if (place < count) StoreQuantized<kWidth>(packs[i], scale.inverse, codes, begin + place);
  }
  if (lane == 0) scales[block] = scale.scale;
}

template <int kWidth, typename Source>
__global__ void __launch_bounds__(kNumThreads)
    EncodeShortBlocks(Source source, int64_t num_values, int64_t block_size, int8_t* codes, float* scales) {
  const int64_t block = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
  const int64_t begin = block * block_size;
  if (begin >= num_values) return;
  const int count = static_cast<int>(min(block_size, num_values - begin));
  if (count % kWidth == 0) {
    EncodeBlock<kWidth>(source, block, begin, count, codes, scales);
  } else {
    EncodeBlock<1>(source, block, begin, count, codes, scales);
  }
}

// Long blocks.

// How blocks are cut into chunks, one for each block of threads.
struct Chunks {
  int64_t num_values;
  int64_t block_size;
  int64_t chunks_per_block;

  Chunks(int64_t num_values, int64_t block_size)
      : num_values(num_values), block_size(block_size), chunks_per_block(CeilDiv(block_size, kMaxValuesOfChunk)) {}

  __device__ int64_t Block() const { return blockIdx.x / chunks_per_block; }

  __device__ int64_t Begin() const {
    return Block() * block_size + blockIdx.x % chunks_per_block * kMaxValuesOfChunk;
  }

  // May lie before Begin(), where the last block is short.
  __device__ int64_t End() const {
    return min(Begin() + kMaxValuesOfChunk, min((Block() + 1) * block_size, num_values));
  }
};

template <int kWidth, typename Source>
__global__ void __launch_bounds__(kNumThreads) FindLargest(Source source, Chunks chunks, uint32_t* largest_of_blocks) {
  __shared__ uint32_t largest_of_chunk;
  if (threadIdx.x == 0) largest_of_chunk = 0;
  __syncthreads();
  const int64_t block = chunks.Block();
  uint32_t largest = 0;
  ForPacks<kWidth>(
      ThreadOfBlock(), chunks.Begin(), chunks.End(),
      [&](auto width, int64_t i) { return source.template Load<width>(i, block); },
      [&](auto width, int64_t, const auto& pack) { largest = max(largest, MaxMagnitude<width>(pack)); });
  largest = MaxOfWarp(largest);
  if (threadIdx.x % kWarpSize == 0) atomicMax(&largest_of_chunk, largest);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(&largest_of_blocks[block], largest_of_chunk);
}

template <int kWidth, typename Source>
__global__ void __launch_bounds__(kNumThreads)
    QuantizeChunks(Source source, Chunks chunks, const uint32_t* largest_of_blocks, int8_t* codes) {
  const int64_t block = chunks.Block();
  const float inverse_scale = ScaleOf(largest_of_blocks[block]).inverse;
  ForPacks<kWidth>(
      ThreadOfBlock(), chunks.Begin(), chunks.End(),
      [&](auto width, int64_t i) { return source.template Load<width>(i, block); },
      [&](auto width, int64_t i, const auto& pack) { StoreQuantized<width>(pack, inverse_scale, codes, i); });
}

// On its own: `scales` may be those that the source reads.
__global__ void __launch_bounds__(kNumThreads)
    WriteScales(const uint32_t* largest_of_blocks, int64_t num_blocks, float* scales) {
  const int64_t block = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (block < num_blocks) scales[block] = ScaleOf(largest_of_blocks[block]).scale;
}

// Decoding.

template <int kWidth>
__global__ void __launch_bounds__(kNumThreads)
    DecodeBlocks(const int8_t* codes, const float* scales, int64_t num_values, uint32_t block_size, float* values) {
  const auto load = [&](auto width, int64_t i) { return LoadPack<width>(codes, i); };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& pack) {
    const float scale = scales[static_cast<uint32_t>(i) / block_size];
    Pack<float, width> floats;
#pragma unroll
    for (int j = 0; j < width; ++j) floats.at[j] = Dequantize(pack.at[j], scale);
    StorePack<width>(values, i, floats);
  });
}

template <int kWidth>
__global__ void __launch_bounds__(kNumThreads)
    AccumulateBlocks(SumSource<float> source, int64_t num_values, uint32_t block_size, float* accumulator) {
  ForPacks<kWidth>(
      ThreadOfGrid(), 0, num_values,
      [&](auto width, int64_t i) {
        return source.template Load<width>(i, static_cast<uint32_t>(i) / block_size);
      },
      [&](auto width, int64_t i, const auto& sums) { StorePack<width>(accumulator, i, sums); });
}

Grid GridFor(Enqueuer& enqueuer, int64_t num_values) {
  return {enqueuer.NumBlocks(num_values, kNumThreads * kValuesPerThread, kBlocksPerMultiprocessor), kNumThreads};
}

// No block is longer than the array.
int64_t EffectiveBlockSize(int64_t num_values, int64_t block_size) {
  return std::min(block_size, std::max<int64_t>(num_values, 1));
}

// Whether no pack of an array begins in one block and ends in another.
bool HoldsWholePacks(int64_t num_values, int64_t block_size) {
  return block_size % kPackWidth == 0 || block_size >= num_values;
}

bool AreValid(int64_t num_values, int64_t block_size) { return IsSize(num_values) && block_size >= 1; }

template <typename Source>
void EncodeBlocks(const Source& source, int64_t num_values, int64_t block_size, int8_t* codes, float* scales,
                  void* workspace, Enqueuer& enqueuer) {
  const int64_t num_blocks = CeilDiv(num_values, block_size);
  const bool in_packs =
      source.IsAlignedToPacks() && IsAligned(codes) && HoldsWholePacks(num_values, block_size);
  WithWidth(in_packs, [&](auto width) {
    if (block_size <= kMaxValuesOfWarp) {
      const Grid grid = {CeilDiv(num_blocks, kWarpsPerBlock), kNumThreads};
      enqueuer.Launch(EncodeShortBlocks<width, Source>, grid, source, num_values, block_size, codes, scales);
      return;
    }
    const Chunks chunks(num_values, block_size);
    const Grid grid = {num_blocks * chunks.chunks_per_block, kNumThreads};
    auto* largest = static_cast<uint32_t*>(workspace);
    enqueuer.Clear(largest, num_blocks * sizeof(uint32_t));
    enqueuer.Launch(FindLargest<width, Source>, grid, source, chunks, largest);
    enqueuer.Launch(QuantizeChunks<width, Source>, grid, source, chunks, largest, codes);
    enqueuer.Launch(WriteScales, {CeilDiv(num_blocks, kNumThreads), kNumThreads}, largest, num_blocks, scales);
  });
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

int64_t HopTfCudaInt8WorkspaceBytes(int64_t num_values, int64_t block_size) {
  if (!AreValid(num_values, block_size)) return 0;
  block_size = EffectiveBlockSize(num_values, block_size);
  if (block_size <= kMaxValuesOfWarp) return 0;
  return CeilDiv(num_values, block_size) * static_cast<int64_t>(sizeof(uint32_t));
}

HopTfStatus HopTfCudaInt8Encode(const void* values, HopTfType type, int64_t num_values, int64_t block_size,
                                int8_t* codes, float* scales, void* workspace, void* stream) {
  if (!AreValid(num_values, block_size) || !IsType(type)) return RefuseArguments();
  if (num_values == 0) return HOP_TF_OK;
  Enqueuer enqueuer(stream);
  block_size = EffectiveBlockSize(num_values, block_size);
  WithType(values, type, [&](auto* typed) {
    EncodeBlocks(PlainSource<ElementOf<decltype(typed)>>{typed}, num_values, block_size, codes, scales, workspace,
                 enqueuer);
  });
  return enqueuer.Finish();
}

HopTfStatus HopTfCudaInt8Reduce(const int8_t* codes, const float* scales, const void* values, HopTfType type,
                                int64_t num_values, int64_t block_size, int8_t* out_codes, float* out_scales,
                                void* workspace, void* stream) {
  if (!AreValid(num_values, block_size) || !IsType(type)) return RefuseArguments();
  if (num_values == 0) return HOP_TF_OK;
  Enqueuer enqueuer(stream);
  block_size = EffectiveBlockSize(num_values, block_size);
  WithType(values, type, [&](auto* typed) {
    const SumSource<ElementOf<decltype(typed)>> sum = {{typed}, codes, scales};
    EncodeBlocks(sum, num_values, block_size, out_codes, out_scales, workspace, enqueuer);
  });
  return enqueuer.Finish();
}

HopTfStatus HopTfCudaInt8Decode(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                                float* values, void* stream) {
  if (!AreValid(num_values, block_size)) return RefuseArguments();
  if (num_values == 0) return HOP_TF_OK;
  Enqueuer enqueuer(stream);
  block_size = EffectiveBlockSize(num_values, block_size);
  const bool in_packs = IsAligned(codes) && IsAligned(values) && HoldsWholePacks(num_values, block_size);
  WithWidth(in_packs, [&](auto width) {
    enqueuer.Launch(DecodeBlocks<width>, GridFor(enqueuer, num_values), codes, scales, num_values, block_size, values);
  });
  return enqueuer.Finish();
}

HopTfStatus HopTfCudaInt8Accumulate(const int8_t* codes, const float* scales, int64_t num_values, int64_t block_size,
                                    float* accumulator, void* stream) {
  if (!AreValid(num_values, block_size)) return RefuseArguments();
  if (num_values == 0) return HOP_TF_OK;
  Enqueuer enqueuer(stream);
  block_size = EffectiveBlockSize(num_values, block_size);
  const SumSource<float> sum = {{accumulator}, codes, scales};
  WithWidth(sum.IsAlignedToPacks() && HoldsWholePacks(num_values, block_size), [&](auto width) {
    enqueuer.Launch(AccumulateBlocks<width>, GridFor(enqueuer, num_values), sum, num_values, block_size, accumulator);
  });
  return enqueuer.Finish();
}
