#include <algorithm>
#include <cstdint>
#include <cstring>

#include "checks.h"
#include "float_bits.h"
#include "hop_tf_kernels.h"

namespace hop_tf {
namespace {

constexpr int64_t kMostValues = int64_t{1} << 48;

bool AreValid(int64_t count, int64_t num_values, int shift) {
  return count >= 0 && count <= num_values && num_values <= kMostValues && shift >= 0 && shift < 48;
}

// Writes numbers of a few bits one behind the other, from the lowest bit of each byte.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* bytes) : bytes_(bytes) {}

  void Add(uint64_t number, int num_bits) {
    word_ |= number << num_in_word_;
    for (num_in_word_ += num_bits; num_in_word_ >= 8; num_in_word_ -= 8, word_ >>= 8) *bytes_++ = LowByte();
  }

  void Finish() {
    if (num_in_word_) *bytes_ = LowByte();
  }

 private:
  uint8_t LowByte() const { return static_cast<uint8_t>(word_); }

  uint8_t* bytes_;
  uint64_t word_ = 0;
  int num_in_word_ = 0;
};

// Reads what `BitWriter` writes.
class BitReader {
 public:
  explicit BitReader(const uint8_t* bytes) : bytes_(bytes) {}

  uint64_t Take(int num_bits) {
    for (; num_in_word_ < num_bits; num_in_word_ += 8) word_ |= static_cast<uint64_t>(*bytes_++) << num_in_word_;
    const uint64_t number = word_ & ((uint64_t{1} << num_bits) - 1);
    word_ >>= num_bits;
    num_in_word_ -= num_bits;
    return number;
  }

  bool rest_is_zero() const { return word_ == 0; }

 private:
  const uint8_t* bytes_;
  uint64_t word_ = 0;
  int num_in_word_ = 0;
};

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfGapsEncode(const int64_t* indices, int64_t count, int64_t num_values, int shift, uint8_t* remainders,
                            uint8_t* quotients, int64_t* num_bytes) {
  if (!AreValid(count, num_values, shift)) return HOP_TF_INVALID_ARGUMENT;
  *num_bytes = 0;
  if (count == 0) return HOP_TF_OK;
  BitWriter writer(remainders);
  const uint64_t mask = (uint64_t{1} << shift) - 1;
  std::memset(quotients, 0, static_cast<size_t>((count + ((num_values - count) >> shift) + 7) / 8));
  int64_t next = 0, bit = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = Load<int64_t>(indices, i), gap = index - next;
    if (gap < 0 || index >= num_values) return HOP_TF_INVALID_ARGUMENT;
    writer.Add(static_cast<uint64_t>(gap) & mask, shift);
    bit += gap >> shift;
    quotients[bit / 8] |= static_cast<uint8_t>(1 << (bit % 8));
    ++bit;
    next = index + 1;
  }
  writer.Finish();
  *num_bytes = (bit + 7) / 8;
  return HOP_TF_OK;
}

HopTfStatus HopTfGapsDecode(const uint8_t* remainders, const uint8_t* quotients, int64_t num_bytes, int64_t count,
                            int64_t num_values, int shift, int64_t* indices) {
  if (!AreValid(count, num_values, shift) || num_bytes < 0) return HOP_TF_INVALID_ARGUMENT;
  if (num_bytes && quotients[num_bytes - 1] == 0) return HOP_TF_INVALID_ARGUMENT;
  BitReader reader(remainders);
  int64_t num_read = 0, next = 0, after_last_one = 0;
  for (int64_t i = 0; i < num_bytes; ++i) {
    for (uint32_t byte = quotients[i]; byte; byte &= byte - 1) {
      const int64_t bit = 8 * i + __builtin_ctz(byte);
      const int64_t quotient = bit - after_last_one;
      after_last_one = bit + 1;
      if (num_read == count || quotient > num_values >> shift) return HOP_TF_INVALID_ARGUMENT;
      const int64_t index = next + (quotient << shift) + static_cast<int64_t>(reader.Take(shift));
      if (index >= num_values) return HOP_TF_INVALID_ARGUMENT;
      Store<int64_t>(indices, num_read++, index);
      next = index + 1;
    }
  }
  return num_read == count && reader.rest_is_zero() ? HOP_TF_OK : HOP_TF_INVALID_ARGUMENT;
}
