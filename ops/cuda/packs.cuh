// Loops over arrays in device memory, several neighboring values at a time.

#ifndef HOP_TF_OPS_CUDA_PACKS_CUH_
#define HOP_TF_OPS_CUDA_PACKS_CUH_

#include <cstdint>
#include <type_traits>

#include "../kernels/constants.h"
#include "hop_tf_cuda.h"

namespace hop_tf {

constexpr uint32_t kQuietBit = 0x00400000u;  // Makes a nan of an infinity.
constexpr uint32_t kNan = kInfinity | kQuietBit;

inline bool IsSize(int64_t num_values) { return num_values >= 0 && num_values <= INT32_MAX; }

inline bool IsType(HopTfType type) {
  return type == HOP_TF_FLOAT32 || type == HOP_TF_BFLOAT16 || type == HOP_TF_FLOAT16;
}

struct BFloat16 {
  static constexpr int kMantissaBits = 7;
  static constexpr uint32_t kInfinity = 0x7f80u;
  uint16_t bits;
};

struct Float16 {
  static constexpr int kMantissaBits = 10;
  static constexpr uint32_t kInfinity = 0x7c00u;
  uint16_t bits;
};

// Calls body(values) with the pointer that `type` means.
template <typename Body>
void WithType(const void* values, HopTfType type, const Body& body) {
  switch (type) {
    case HOP_TF_FLOAT32:
      return body(static_cast<const float*>(values));
    case HOP_TF_BFLOAT16:
      return body(static_cast<const BFloat16*>(values));
    case HOP_TF_FLOAT16:
      return body(static_cast<const Float16*>(values));
  }
}

// What a pointer to constant values points to.
template <typename Pointer>
using ElementOf = std::remove_const_t<std::remove_pointer_t<Pointer>>;

// The float32 pattern of a value; exact.
__device__ inline uint32_t ToPattern(float value) { return __float_as_uint(value); }

__device__ inline uint32_t ToPattern(BFloat16 value) { return static_cast<uint32_t>(value.bits) << 16; }

__device__ inline uint32_t ToPattern(Float16 value) {
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return sign | (magnitude << 13) | kInfinity;
  if (magnitude >= 0x0400u) return sign | ((magnitude << 13) + (112u << 23));
  return sign | __float_as_uint(__fmul_rn(static_cast<float>(magnitude), 0x1p-24f));
}

// `kWidth` neighbors in an array, moved in one access.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T at[kWidth];
};

constexpr int kPackWidth = 4;

// A number of neighbors, as an argument that is constant.
template <int kWidth>
struct Width {
  __host__ __device__ constexpr operator int() const { return kWidth; }
};

// Whether an array can be accessed in packs.
template <typename T>
bool IsAligned(const T* array) {
  return reinterpret_cast<uintptr_t>(array) % (sizeof(T) * kPackWidth) == 0;
}

// Calls body(width) with the width that arrays can be accessed in, as a constant.
template <typename Body>
void WithWidth(bool is_aligned, const Body& body) {
  if (is_aligned) {
    body(Width<kPackWidth>{});
  } else {
    body(Width<1>{});
  }
}

template <int kWidth, typename T>
__device__ Pack<T, kWidth> LoadPack(const T* array, int64_t index) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(array + index);
}

template <int kWidth, typename T>
__device__ void StorePack(T* array, int64_t index, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(array + index) = pack;
}

template <int kWidth, typename T>
__device__ Pack<uint32_t, kWidth> LoadPatterns(const T* values, int64_t index) {
  const Pack<T, kWidth> pack = LoadPack<kWidth>(values, index);
  Pack<uint32_t, kWidth> patterns;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) patterns.at[i] = ToPattern(pack.at[i]);
  return patterns;
}

// A thread among those that share a loop.
struct Worker {
  int64_t index;
  int64_t num_workers;
};

__device__ inline Worker ThreadOfBlock() { return {threadIdx.x, blockDim.x}; }

__device__ inline Worker ThreadOfGrid() {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x;
  return {first + threadIdx.x, int64_t{gridDim.x} * blockDim.x};
}

// Packs that a thread loads before it uses the first: so much has to be under way to keep the memory busy.
constexpr int kLoadsInFlight = 4;

// What a thread handles in one round of a loop, at most.
constexpr int kValuesPerThread = kPackWidth * kLoadsInFlight;

// Shares [begin, end) among the workers: calls use(width, index, load(width, index)) for packs of `kWidth` values, and
// for the rest, too short for a pack, with width 1. Packs are aligned if `begin` is.
template <int kWidth, typename Load, typename Use>
__device__ void ForPacks(const Worker& worker, int64_t begin, int64_t end, const Load& load, const Use& use) {
  constexpr Width<kWidth> width;
  const int64_t num_packs = (end - begin) / kWidth;
  for (int64_t first = worker.index; first < num_packs; first += kLoadsInFlight * worker.num_workers) {
    decltype(load(width, begin)) loaded[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int64_t pack = first + i * worker.num_workers;
      if (pack < num_packs) loaded[i] = load(width, begin + pack * kWidth);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int64_t pack = first + i * worker.num_workers;
      if (pack < num_packs) use(width, begin + pack * kWidth, loaded[i]);
    }
  }
  if constexpr (kWidth > 1) ForPacks<1>(worker, begin + num_packs * kWidth, end, load, use);
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_PACKS_CUH_
