// Floating-point numbers as bit patterns, in arrays that need not be aligned.

#ifndef HOP_TF_OPS_KERNELS_FLOAT_BITS_H_
#define HOP_TF_OPS_KERNELS_FLOAT_BITS_H_

#include <cstdint>
#include <cstring>

#include "constants.h"

namespace hop_tf {

// Where element `index` lies of an array of T that may begin at any address.
template <typename T>
inline void* At(T* array, int64_t index) {
  return reinterpret_cast<char*>(array) + index * static_cast<int64_t>(sizeof(T));
}

template <typename T>
inline const void* At(const T* array, int64_t index) {
  return reinterpret_cast<const char*>(array) + index * static_cast<int64_t>(sizeof(T));
}

// Reads and writes such an element.
template <typename T>
inline T Load(const void* array, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(array) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename T>
inline void Store(void* array, int64_t index, T value) {
  std::memcpy(static_cast<char*>(array) + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

inline uint32_t ToBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The float32 pattern of a float16; exact. Without branches, so that loops over it are vectorized.
inline uint32_t HalfToFloatBits(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t denormal = ToBits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t not_finite = (magnitude << 13) | kInfinity;
  const uint32_t finite = magnitude < 0x0400u ? denormal : normal;
  return (static_cast<uint32_t>(half & 0x8000u) << 16) | (magnitude < 0x7c00u ? finite : not_finite);
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_KERNELS_FLOAT_BITS_H_
