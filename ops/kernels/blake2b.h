// BLAKE2b with a key and 8 bytes of digest (RFC 7693), as `hashlib.blake2b(key=..., digest_size=8)`.

#ifndef HOP_TF_OPS_KERNELS_BLAKE2B_H_
#define HOP_TF_OPS_KERNELS_BLAKE2B_H_

#include <cstddef>
#include <cstdint>

namespace hop_tf {

class Blake2b {
 public:
  static constexpr int kKeyBytes = 32;
  static constexpr int kDigestBytes = 8;

  explicit Blake2b(const uint8_t* key);

  void Add(const void* data, size_t num_bytes);

  // Nothing may be added afterwards.
  void Finish(uint8_t* digest);

 private:
  static constexpr size_t kBlockBytes = 128;

  void Compress(bool is_last);

  uint64_t state_[8];
  uint64_t num_bytes_ = 0;
  uint8_t block_[kBlockBytes] = {};
  size_t num_in_block_ = 0;
};

}  // namespace hop_tf

#endif  // HOP_TF_OPS_KERNELS_BLAKE2B_H_
