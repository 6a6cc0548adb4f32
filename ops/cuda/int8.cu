// 8-bit blocks. A warp encodes a block that fits into its registers. Longer blocks are cut into chunks: one launch
// finds the largest magnitude of each block, a second quantizes, a third writes the scales.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../kernels/constants.h"
#include "block_scan.cuh"
#include "enqueuer.h"
#include "packs.cuh"

namespace hop_tf {
namespace {

constexpr int kNumThreads = 256;
constexpr int kBlocksPerMultiprocessor = 32;
constexpr int kWarpsPerBlock = kNumThreads / kWarpSize;

// The most that a warp keeps in registers. If blocks are short enough, half of that leaves room for more warps.
constexpr int kMaxValuesPerLane = 32;
constexpr int64_t kMaxValuesOfWarp = kMaxValuesPerLane * kWarpSize;

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

// Sources give the values to encode. Load only reads memory, so that a thread can have several loads in flight.
// ToFloats turns the result into values; it also needs Scale(block).
template <typename T>
struct PlainSource {
  const T* values;

  bool IsAlignedToPacks() const { return IsAligned(values); }

  __device__ float Scale(int64_t) const { return 0.0f; }

  template <int kWidth>
  __device__ Pack<T, kWidth> Load(int64_t index) const {
    return LoadPack<kWidth>(values, index);
  }

  template <int kWidth>
  __device__ static Pack<float, kWidth> ToFloats(const Pack<T, kWidth>& pack, float) {
    Pack<float, kWidth> floats;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) floats.at[i] = __uint_as_float(ToPattern(pack.at[i]));
    return floats;
  }
};

// values + codes * scales[block]. The thread that loaded terms may overwrite them later.
template <typename T>
struct SumSource {
  PlainSource<T> plain;
  const int8_t* codes;
  const float* scales;

  // All codes in one word: single bytes would take a register each.
  template <int kWidth>
  struct Terms {
    Pack<T, kWidth> values;
    std::conditional_t<kWidth == kPackWidth, uint32_t, uint8_t> codes;
  };

  bool IsAlignedToPacks() const { return plain.IsAlignedToPacks() && IsAligned(codes); }

  __device__ float Scale(int64_t block) const { return scales[block]; }

  template <int kWidth>
  __device__ Terms<kWidth> Load(int64_t index) const {
    using Codes = decltype(Terms<kWidth>::codes);
    static_assert(sizeof(Codes) == kWidth, "a byte for each code");
    return {plain.template Load<kWidth>(index), *reinterpret_cast<const Codes*>(codes + index)};
  }

  template <int kWidth>
  __device__ static Pack<float, kWidth> ToFloats(const Terms<kWidth>& terms, float scale) {
    Pack<float, kWidth> sums = PlainSource<T>::template ToFloats<kWidth>(terms.values, scale);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto code = static_cast<int8_t>(terms.codes >> (8 * i) & 0xffu);
      sums.at[i] = __fadd_rn(sums.at[i], Dequantize(code, scale));
    }
    return sums;
  }
};

// Short blocks.

// Encodes one block of at most `kValuesPerLane` values per lane. The whole warp calls it.
template <int kValuesPerLane, int kWidth, typename Source>
__device__ void EncodeBlock(const Source& source, int64_t block, int64_t begin, int count, int8_t* codes,
                            float* scales) {
  constexpr int kNumPacks = kValuesPerLane / kWidth;
  const int lane = threadIdx.x % kWarpSize;
  const int in_packs = count / kWidth * kWidth;
  const float source_scale = source.Scale(block);
  decltype(source.template Load<kWidth>(begin)) loaded[kNumPacks];
#pragma unroll
  for (int i = 0; i < kNumPacks; ++i) {
    const int place = (i * kWarpSize + lane) * kWidth;
    if (place < in_packs) loaded[i] = source.template Load<kWidth>(begin + place);
  }
  // The end of the array may be too short for a pack.
  const bool has_rest = in_packs + lane < count;
  Pack<float, 1> rest = {0.0f};
  if (has_rest) {
    rest = Source::template ToFloats<1>(source.template Load<1>(begin + in_packs + lane), source_scale);
  }
  Pack<float, kWidth> packs[kNumPacks];
  uint32_t largest = MaxMagnitude<1>(rest);
#pragma unroll
  for (int i = 0; i < kNumPacks; ++i) {
    if ((i * kWarpSize + lane) * kWidth >= in_packs) continue;
    packs[i] = Source::template ToFloats<kWidth>(loaded[i], source_scale);
    largest = max(largest, MaxMagnitude<kWidth>(packs[i]));
  }
  const Scale scale = ScaleOf(MaxOfWarp(largest));
#pragma unroll
  for (int i = 0; i < kNumPacks; ++i) {
    const int place = (i * kWarpSize + lane) * kWidth;
    if (place < in_packs) StoreQuantized<kWidth>(packs[i], scale.inverse, codes, begin + place);
  }
  if (has_rest) StoreQuantized<1>(rest, scale.inverse, codes, begin + in_packs + lane);
  if (lane == 0) scales[block] = scale.scale;
}

template <int kValuesPerLane, int kWidth, typename Source>
__global__ void __launch_bounds__(kNumThreads)
    EncodeShortBlocks(Source source, int64_t num_values, int64_t block_size, int8_t* codes, float* scales) {
  const int64_t block = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
  const int64_t begin = block * block_size;
  if (begin >= num_values) return;
  const int count = static_cast<int>(min(block_size, num_values - begin));
  EncodeBlock<kValuesPerLane, kWidth>(source, block, begin, count, codes, scales);
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
  const float source_scale = source.Scale(block);
  uint32_t largest = 0;
  ForPacks<kWidth>(
      ThreadOfBlock(), chunks.Begin(), chunks.End(),
      [&](auto width, int64_t i) { return source.template Load<width>(i); },
      [&](auto width, int64_t, const auto& loaded) {
        largest = max(largest, MaxMagnitude<width>(Source::template ToFloats<width>(loaded, source_scale)));
      });
  largest = MaxOfWarp(largest);
  if (threadIdx.x % kWarpSize == 0) atomicMax(&largest_of_chunk, largest);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(&largest_of_blocks[block], largest_of_chunk);
}

template <int kWidth, typename Source>
__global__ void __launch_bounds__(kNumThreads)
    QuantizeChunks(Source source, Chunks chunks, const uint32_t* largest_of_blocks, int8_t* codes) {
  const int64_t block = chunks.Block();
  const float source_scale = source.Scale(block);
  const float inverse_scale = ScaleOf(largest_of_blocks[block]).inverse;
  ForPacks<kWidth>(
      ThreadOfBlock(), chunks.Begin(), chunks.End(),
      [&](auto width, int64_t i) { return source.template Load<width>(i); },
      [&](auto width, int64_t i, const auto& loaded) {
        StoreQuantized<width>(Source::template ToFloats<width>(loaded, source_scale), inverse_scale, codes, i);
      });
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
struct ScaledTerms {
  SumSource<float>::Terms<kWidth> terms;
  float scale;
};

template <int kWidth>
__global__ void __launch_bounds__(kNumThreads)
    AccumulateBlocks(SumSource<float> source, int64_t num_values, uint32_t block_size, float* accumulator) {
  const auto load = [&](auto width, int64_t i) {
    return ScaledTerms<width>{source.Load<width>(i), source.Scale(static_cast<uint32_t>(i) / block_size)};
  };
  ForPacks<kWidth>(ThreadOfGrid(), 0, num_values, load, [&](auto width, int64_t i, const auto& loaded) {
    StorePack<width>(accumulator, i, SumSource<float>::ToFloats<width>(loaded.terms, loaded.scale));
  });
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
      constexpr int kMany = kMaxValuesPerLane, kFew = kMany / 2;
      const auto kernel = block_size <= kFew * kWarpSize ? EncodeShortBlocks<kFew, width, Source>
                                                         : EncodeShortBlocks<kMany, width, Source>;
      const Grid grid = {CeilDiv(num_blocks, kWarpsPerBlock), kNumThreads};
      enqueuer.Launch(kernel, grid, source, num_values, block_size, codes, scales);
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
