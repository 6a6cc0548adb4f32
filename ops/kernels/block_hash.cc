#include <cstdint>
#include <cstring>

#include "checks.h"
#include "hop_tf_kernels.h"

// Not for x86-64-v4: there the compiler takes an instruction for products of 64 bits, which is slower.
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && !defined(HOP_TF_SINGLE_VERSION)
#define HOP_TF_HASH_VERSIONS __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define HOP_TF_HASH_VERSIONS
#endif

namespace hop_tf {
namespace {

constexpr int kBlockWords = HOP_TF_HASH_BLOCK_BYTES / 4;
constexpr int kPairs = 8;  // In each stripe of 64 bytes.

inline uint32_t LoadWord(const uint8_t* bytes, int index) {
  uint32_t word;
  std::memcpy(&word, bytes + 4 * index, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap32(word);
#endif
  return word;
}

HOP_TF_HASH_VERSIONS uint64_t HashBlock(const uint8_t* block, const uint32_t* key) {
  uint64_t sums[kPairs] = {};
  for (int stripe = 0; stripe < kBlockWords; stripe += 2 * kPairs) {
    for (int i = stripe; i < stripe + kPairs; ++i) {
      sums[i - stripe] += static_cast<uint64_t>(LoadWord(block, i) + key[i]) *
                          (LoadWord(block, i + kPairs) + key[i + kPairs]);
    }
  }
  uint64_t digest = 0;
  for (int i = 0; i < kPairs; ++i) digest += sums[i];
  return digest;
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfBlockHash(const uint8_t* data, int64_t num_blocks, const uint32_t* key, uint64_t* digests) {
  if (!IsSize(num_blocks)) return HOP_TF_INVALID_ARGUMENT;
  for (int64_t i = 0; i < num_blocks; ++i) digests[i] = HashBlock(data + i * HOP_TF_HASH_BLOCK_BYTES, key);
  return HOP_TF_OK;
}
