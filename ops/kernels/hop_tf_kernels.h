// The C interface of hop_tf's kernels: quantile sketch, 8-bit blocks, few bits, 16-bit truncation, selection and codes
// of indices, hash of blocks; and frames that come on sockets.
//
// Plain memory in, plain memory out; no dependency but the C++ library. Arrays need no alignment. Inputs and outputs
// must not overlap unless it says so. Functions may be called from any number of threads at once, and their results
// depend neither on the number of threads nor on the instruction set.
//
// Common arguments:
//   num_values   at least 0, at most 2^31 - 1; with 0 the pointers to arrays of that many may be null.
//   num_threads  how many threads to use at most; 0 or less: as many as the process was given cores (its affinity and
//                its control group's quota, or what TF_NUM_INTRAOP_THREADS or OMP_NUM_THREADS say, if that is less).
//                Calls at the same time share them. Small arrays take one.
//
// To the sketch, values with a magnitude below 2^-126 (denormals) are zero. Sums follow the calling thread's mode.

#ifndef HOP_TF_OPS_KERNELS_HOP_TF_KERNELS_H_
#define HOP_TF_OPS_KERNELS_HOP_TF_KERNELS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOP_TF_EXPORT __attribute__((visibility("default")))

typedef enum {
  HOP_TF_OK = 0,
  HOP_TF_INVALID_ARGUMENT = 1,
  HOP_TF_OUT_OF_MEMORY = 2,
  HOP_TF_DEVICE_ERROR = 3,
} HopTfStatus;

typedef enum {
  HOP_TF_FLOAT32 = 0,
  HOP_TF_BFLOAT16 = 1,
  HOP_TF_FLOAT16 = 2,
} HopTfType;

// Quantile sketch: sorts values into 256 buckets and keeps, for each, the mean of its members.
//
// A bucket's share is the sum over its bins of count^spacing * width^(1 - spacing): spacing 1 gives buckets of equal
// counts (quantiles; Zhou et al., "Canary", section 4), 1/3 the smallest mean squared error (Panter and Dite).
//
// values         num_values values of `type`.
// spacing        above 0, at most 1.
// codes          num_values bucket numbers; they rise with the values.
// bucket_values  256 means, rising; behind the last bucket in use its value is repeated. If some value is not
//                finite, all are nan and all codes 0.
HOP_TF_EXPORT HopTfStatus HopTfSketchEncode(const void* values, HopTfType type, int64_t num_values, double spacing,
                                            uint8_t* codes, float* bucket_values, int num_threads);

// values[i] = bucket_values[codes[i]]
HOP_TF_EXPORT HopTfStatus HopTfSketchDecode(const uint8_t* codes, const float* bucket_values, int64_t num_values,
                                            float* values, int num_threads);

// accumulator[i] += bucket_values[codes[i]]
HOP_TF_EXPORT HopTfStatus HopTfSketchAccumulate(const uint8_t* codes, const float* bucket_values, int64_t num_values,
                                                float* accumulator, int num_threads);

// 8-bit blocks: with scale = (largest magnitude of the block) / 127, codes[i] = round(values[i] / scale), computed as
// values[i] * (127 / largest magnitude); ties to even.
//
// A block whose magnitudes all lie below 2^-119 gets scale 0; one that holds a value that is not finite, scale nan.
//
// block_size  values per block, from 1 to 2^31 - 1; the last block may be shorter.
// codes       num_values.
// scales      ceil(num_values / block_size).
HOP_TF_EXPORT HopTfStatus HopTfInt8Encode(const void* values, HopTfType type, int64_t num_values, int64_t block_size,
                                          int8_t* codes, float* scales, int num_threads);

// values[i] = codes[i] * scales[i / block_size].
HOP_TF_EXPORT HopTfStatus HopTfInt8Decode(const int8_t* codes, const float* scales, int64_t num_values,
                                          int64_t block_size, float* values, int num_threads);

// accumulator[i] += codes[i] * scales[i / block_size].
HOP_TF_EXPORT HopTfStatus HopTfInt8Accumulate(const int8_t* codes, const float* scales, int64_t num_values,
                                              int64_t block_size, float* accumulator, int num_threads);

// Encodes values[i] + codes[i] * scales[i / block_size], summed in float32. `out_codes` and `out_scales` may be
// `codes` and `scales`.
HOP_TF_EXPORT HopTfStatus HopTfInt8Reduce(const int8_t* codes, const float* scales, const void* values,
                                          HopTfType type, int64_t num_values, int64_t block_size, int8_t* out_codes,
                                          float* out_scales, int num_threads);

// Few bits: blocks of values with 4 or 2 bits a value, and scales in bfloat16.
//
// 4 bits: a block's scale is its value of largest magnitude, with its sign, rounded to the nearest bfloat16 (ties to
// even; at most the largest finite one); of two equal magnitudes the positive one. round(value * (64 / scale)), ties to
// even, becomes the nearest of 16 levels, and its number is the code. A code decodes to scale / 64 times its level:
//
//     -55 -42 -31 -22 -15 -8 -3 0 3 8 13 20 29 38 51 64
//
// 2 bits: a block has two scales, `lower` and `upper`. Its magnitudes, in units of 1/32768 of the largest one, are
// rounded to integers: round(magnitude * (128 / largest) * 256), ties to even. They are split at their mean, and then
// in the middle between the means of both parts: what is equal to the border is below it. The scales are the means of
// the two parts that this leaves, computed in float64, then in float32, and rounded like the scales above; a mean below
// 2^-119, or of no values, is 0. Bit 0 of a code is 1 for the upper part, bit 1 is 1 for a negative value.
//
// A block whose magnitudes all lie below 2^-119 has scales 0 and decodes to zeros; one that holds a value that is not
// finite, scales nan, and decodes to nan.
//
// block_size  values per block: a multiple of 8 from 8 to 1024; the last block may be shorter.
// scales      ceil(num_values / block_size) * (4 / bits): with 2 bits each block's lower one first.
// codes       ceil(num_values * bits / 8) bytes. The first value's code is in the lowest bits.
HOP_TF_EXPORT HopTfStatus HopTfFewBitsEncode(const void* values, HopTfType type, int64_t num_values,
                                             int64_t block_size, int bits, uint16_t* scales, uint8_t* codes,
                                             int num_threads);

// values[i] = what the code of value i stands for.
HOP_TF_EXPORT HopTfStatus HopTfFewBitsDecode(const uint16_t* scales, const uint8_t* codes, int64_t num_values,
                                             int64_t block_size, int bits, float* values, int num_threads);

// accumulator[i] += what the code of value i stands for.
HOP_TF_EXPORT HopTfStatus HopTfFewBitsAccumulate(const uint16_t* scales, const uint8_t* codes, int64_t num_values,
                                                 int64_t block_size, int bits, float* accumulator, int num_threads);

// Encodes the sum, in float32, of values[i] and what its code stands for. The results may be `scales` and `codes`.
HOP_TF_EXPORT HopTfStatus HopTfFewBitsReduce(const uint16_t* scales, const uint8_t* codes, const void* values,
                                             HopTfType type, int64_t num_values, int64_t block_size, int bits,
                                             uint16_t* out_scales, uint8_t* out_codes, int num_threads);

// The upper 16 bits of each value as float32 (a bfloat16): truncated, or rounded to the nearest, ties to even. A nan
// stays a nan.
HOP_TF_EXPORT HopTfStatus HopTfTruncate16Encode(const void* values, HopTfType type, int64_t num_values,
                                                int round_to_nearest, uint16_t* halves, int num_threads);

// The float32 whose upper 16 bits are halves[i] and whose lower ones are 0.
HOP_TF_EXPORT HopTfStatus HopTfTruncate16Decode(const uint16_t* halves, int64_t num_values, float* values,
                                                int num_threads);

// accumulator[i] += the float32 that halves[i] is decoded to.
HOP_TF_EXPORT HopTfStatus HopTfTruncate16Accumulate(const uint16_t* halves, int64_t num_values, float* accumulator,
                                                    int num_threads);

// Increasing indices as Rice codes of their gaps. With a gap of values without an index before each, gap % 2^shift is
// its remainder, of `shift` bits, and gap / 2^shift its quotient, that many 0 and then a 1. Remainders and quotients are
// apart. The bits of both follow each other from the lowest of each byte on, and are 0 behind the last one.
//
// count       at most num_values.
// num_values  at most 2^48: above all indices.
// shift       from 0 to 47.
// remainders  ceil(count * shift / 8) bytes.
// quotients   ceil((count + floor((num_values - count) / 2^shift)) / 8) bytes, of which the first `num_bytes` count.
//             If `count` is 0, no byte of it is written, nor of `remainders`.
HOP_TF_EXPORT HopTfStatus HopTfGapsEncode(const int64_t* indices, int64_t count, int64_t num_values, int shift,
                                          uint8_t* remainders, uint8_t* quotients, int64_t* num_bytes);

// The indices. HOP_TF_INVALID_ARGUMENT if the bytes are not what HopTfGapsEncode makes of so many; then some are written.
HOP_TF_EXPORT HopTfStatus HopTfGapsDecode(const uint8_t* remainders, const uint8_t* quotients, int64_t num_bytes,
                                          int64_t count, int64_t num_values, int shift, int64_t* indices);

// Writes first + i for each value i whose pattern without the sign, as a number, is at least `bound`: for floating-point
// numbers, whose magnitude is large enough; nan counts as the largest.
//
// value_bytes  2, 4 or 8.
// bound        from 1 to the largest pattern without the sign.
// indices      room for num_values.
// number       how many there are.
HOP_TF_EXPORT HopTfStatus HopTfSelectLarge(const void* values, int value_bytes, int64_t num_values, int64_t bound,
                                           int64_t first, int64_t* indices, int64_t* number);

// A hash of each block of 4096 bytes, for checksums of messages: NH (Black et al., "UMAC", 1999). With x the block's
// 32-bit words (the lowest byte first), it is the sum, modulo 2^64, of (x[i] + key[i]) * (x[i + 8] + key[i + 8]) over
// those i whose remainder modulo 16 is below 8; sums with the key are modulo 2^32. With a random key two different
// blocks have the same digest with a probability of at most 2^-32. The digests must stay secret.
//
// data        num_blocks * 4096 bytes.
// key         1024 random words.
// digests     one for each block.
#define HOP_TF_HASH_BLOCK_BYTES 4096
HOP_TF_EXPORT HopTfStatus HopTfBlockHash(const uint8_t* data, int64_t num_blocks, const uint32_t* key,
                                         uint64_t* digests);

// How many threads `num_threads` = 0 means here.
HOP_TF_EXPORT int HopTfNumCores(void);

// Compiler and instruction set in use, for instance "g++ 12.2.0, x86-64-v4". Static memory.
HOP_TF_EXPORT const char* HopTfBuildInfo(void);

// Frames of messages (see `hop_tf.transport.framing`) on sockets.
//
// A frame is a head of HOP_TF_HEAD_BYTES, the name of a queue, a header, a payload, and a checksum.
#define HOP_TF_HEAD_BYTES 34

typedef enum {
  HOP_TF_BEGUN = 0,
  HOP_TF_COMPLETE = 1,
  HOP_TF_OTHER = 2,    // The socket has something else.
  HOP_TF_CORRUPT = 3,  // The checksum is wrong.
  HOP_TF_ENDED = 4,    // The connection is broken, or was closed.
} HopTfFrameState;

typedef struct {
  uint8_t* data;
  int64_t num_bytes;
} HopTfPiece;

// Products of a row-major matrix, rows x columns, with `rank` vectors, each of them contiguous. The order of operations
// is fixed, so the results are equal on all processors.

// products[each] = matrix vectors[each]: vectors of `columns` values, products of `rows`.
HOP_TF_EXPORT HopTfStatus HopTfTimesVectors(const float* matrix, int64_t rows, int64_t columns, const float* vectors,
                                            int64_t rank, float* products);

// products[each] = matrix^T vectors[each]: vectors of `rows` values, products of `columns`.
HOP_TF_EXPORT HopTfStatus HopTfVectorsTimes(const float* vectors, int64_t rank, const float* matrix, int64_t rows,
                                            int64_t columns, float* products);

// matrix += scale * sum of left[each] right[each]^T: left vectors of `rows` values, right ones of `columns`.
HOP_TF_EXPORT HopTfStatus HopTfAddProduct(double scale, const float* left, const float* right, int64_t rank,
                                          int64_t rows, int64_t columns, float* matrix);

// Makes vectors of `size` values orthogonal, and of length 1. Another vector takes the place of one in the span of those
// before it; if there are `size` of these, 0.
HOP_TF_EXPORT HopTfStatus HopTfOrthonormalize(float* vectors, int64_t rank, int64_t size);

typedef struct {
  int32_t socket;
  int32_t is_outgoing;  // Else it is awaited.
  int32_t flags;        // Of the head. An awaited frame may have HOP_TF_ACK_REQUESTED, too; it is set then.
  int32_t queue_bytes;
  int32_t header_bytes;
  int32_t checksum_bytes;  // 8, or 0: there is none, and the four fields of it are of no matter.
  int64_t sequence;
  const uint8_t* text;         // The queue's name and the header.
  const HopTfPiece* payload;   // What is sent, or where it is to be put.
  int64_t num_pieces;
  uint8_t* start;              // Room for what comes before the payload, and, once the frame has gone or come, that.
  uint8_t* checksum;           // The same for the checksum.
  int64_t number;              // Of the frame: how many the connection has brought before.
  const uint8_t* key;          // 32 bytes: of the checksum.
  const uint32_t* block_key;   // See HopTfBlockHash.
  int32_t state;
  int64_t num_done;  // How many bytes have gone or come.
} HopTfFrame;

#define HOP_TF_ACK_REQUESTED 1

// Sends frames, and receives others meanwhile, in whichever order they can go on. Each has a socket of its own. Awaited
// frames that are not complete may be passed once more.
//
// Returns when all outgoing frames are complete, or, where there are none, all awaited ones. Also when one can never be
// complete, nothing has gone or come for `idle_ms` milliseconds, or `total_ms` are over; and, when all awaited frames
// are there, as soon as a socket takes no more for a while. What has come of a frame that is not complete may also be
// the beginning of something else.
HOP_TF_EXPORT HopTfStatus HopTfExchangeFrames(HopTfFrame* const* frames, int64_t num_frames, int idle_ms,
                                              int total_ms);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // HOP_TF_OPS_KERNELS_HOP_TF_KERNELS_H_
