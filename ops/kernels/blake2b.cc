#include "blake2b.h"

#include <algorithm>
#include <cstring>

namespace hop_tf {
namespace {

constexpr uint64_t kInitial[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

// Which word of the block goes where, in each round; rounds 10 and 11 are as 0 and 1.
constexpr int kRounds = 12;
constexpr uint8_t kOrders[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

inline uint64_t Rotated(uint64_t value, int count) { return (value >> count) | (value << (64 - count)); }

inline uint64_t LoadWord(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  return word;
}

inline void Mix(uint64_t* v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
  v[a] += v[b] + x;
  v[d] = Rotated(v[d] ^ v[a], 32);
  v[c] += v[d];
  v[b] = Rotated(v[b] ^ v[c], 24);
  v[a] += v[b] + y;
  v[d] = Rotated(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = Rotated(v[b] ^ v[c], 63);
}

}  // namespace

Blake2b::Blake2b(const uint8_t* key) {
  std::copy(kInitial, kInitial + 8, state_);
  state_[0] ^= 0x01010000 ^ (kKeyBytes << 8) ^ kDigestBytes;  // One leaf, of one level.
  std::memcpy(block_, key, kKeyBytes);
  num_in_block_ = kBlockBytes;
}

void Blake2b::Add(const void* data, size_t num_bytes) {
  const uint8_t* bytes = static_cast<const uint8_t*>(data);
  while (num_bytes) {
    if (num_in_block_ == kBlockBytes) Compress(/*is_last=*/false);  // Not before it is known that more follows.
    const size_t count = std::min(num_bytes, kBlockBytes - num_in_block_);
    std::memcpy(block_ + num_in_block_, bytes, count);
    num_in_block_ += count;
    bytes += count;
    num_bytes -= count;
  }
}

void Blake2b::Finish(uint8_t* digest) {
  std::fill(block_ + num_in_block_, block_ + kBlockBytes, uint8_t{0});
  Compress(/*is_last=*/true);
  for (int i = 0; i < kDigestBytes; ++i) digest[i] = static_cast<uint8_t>(state_[0] >> (8 * i));
}

void Blake2b::Compress(bool is_last) {
  num_bytes_ += num_in_block_;
  num_in_block_ = 0;
  uint64_t words[16], v[16];
  for (int i = 0; i < 16; ++i) words[i] = LoadWord(block_ + 8 * i);
  std::copy(state_, state_ + 8, v);
  std::copy(kInitial, kInitial + 8, v + 8);
  v[12] ^= num_bytes_;
  if (is_last) v[14] = ~v[14];
  for (int round = 0; round < kRounds; ++round) {
    const uint8_t* order = kOrders[round % 10];
    for (int i = 0; i < 4; ++i) Mix(v, i, 4 + i, 8 + i, 12 + i, words[order[2 * i]], words[order[2 * i + 1]]);
    for (int i = 0; i < 4; ++i) {
      Mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, words[order[8 + 2 * i]], words[order[9 + 2 * i]]);
    }
  }
  for (int i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[8 + i];
}

}  // namespace hop_tf
