// Calls every function of the C interface with random sizes, addresses, types and bit patterns, and compares the results
// with plain loops. Built with sanitizers by ops_fuzz_test.py.
//
//   ops_fuzz SEED ROUNDS

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../../ops/kernels/hop_tf_kernels.h"

namespace {

std::mt19937_64 generator;

int64_t Uniform(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(generator); }

void Check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

// Memory at an odd address, with nothing behind it: whoever writes or reads too far is caught.
template <typename T>
class Array {
 public:
  explicit Array(int64_t size) : size_(size), offset_(Uniform(0, 16)), bytes_(new char[offset_ + size * sizeof(T)]) {
    std::memset(bytes_.get(), 0x5a, offset_ + size * sizeof(T));
  }

  T* data() { return reinterpret_cast<T*>(bytes_.get() + offset_); }
  int64_t size() const { return size_; }

  T Get(int64_t index) const {
    T value;
    std::memcpy(&value, bytes_.get() + offset_ + index * sizeof(T), sizeof(T));
    return value;
  }

  void Set(int64_t index, T value) { std::memcpy(bytes_.get() + offset_ + index * sizeof(T), &value, sizeof(T)); }

 private:
  int64_t size_;
  int64_t offset_;
  std::unique_ptr<char[]> bytes_;
};

// Values of any type, and what they are as float32.
class Values {
 public:
  explicit Values(int64_t size)
      : type_(static_cast<HopTfType>(Uniform(0, 2))), words_(type_ == HOP_TF_FLOAT32 ? size : 0),
        halves_(type_ == HOP_TF_FLOAT32 ? 0 : size), floats_(size) {
    const int kind = static_cast<int>(Uniform(0, 4));
    for (int64_t i = 0; i < size; ++i) {
      if (type_ == HOP_TF_FLOAT32) {
        words_.Set(i, Pattern(kind));
        floats_[i] = FromPattern(words_.Get(i));
      } else {
        halves_.Set(i, static_cast<uint16_t>(Pattern(kind) >> 16));
        floats_[i] = type_ == HOP_TF_BFLOAT16 ? FromPattern(static_cast<uint32_t>(halves_.Get(i)) << 16)
                                              : FromHalf(halves_.Get(i));
      }
    }
  }

  const void* data() { return type_ == HOP_TF_FLOAT32 ? static_cast<void*>(words_.data()) : halves_.data(); }
  HopTfType type() const { return type_; }
  float operator[](int64_t index) const { return floats_[index]; }

 private:
  static uint32_t Pattern(int kind) {
    const uint32_t any = static_cast<uint32_t>(generator());
    switch (kind) {
      case 0:
        return any;  // Anything, nan and infinity too.
      case 1:
        return any & 0x807fffffu;  // Denormals.
      case 2:
        return Uniform(0, 9) ? 0u : (any & 0x3fffffffu);  // Mostly zeros.
      case 3:
        return 0x3f800000u | (any & 0x3ffu);  // A narrow range.
      default:
        return (any & 0x80ffffffu) | 0x3b000000u;  // Around 0.002 and 0.0001, of both signs.
    }
  }

  static float FromPattern(uint32_t pattern) {
    float value;
    std::memcpy(&value, &pattern, sizeof(value));
    return value;
  }

  static float FromHalf(uint16_t half) {
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    float magnitude = std::ldexp(static_cast<float>(exponent ? 1024 + mantissa : mantissa), (exponent ? exponent : 1) - 25);
    if (exponent == 31) magnitude = mantissa ? std::nanf("") : std::numeric_limits<float>::infinity();
    return half >> 15 ? -magnitude : magnitude;
  }

  HopTfType type_;
  Array<uint32_t> words_;
  Array<uint16_t> halves_;
  std::vector<float> floats_;
};

bool Same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

int RandomThreads() { return static_cast<int>(Uniform(0, 3)); }

void FuzzSketch(int64_t size) {
  Values values(size), others(size);
  const double spacing = Uniform(0, 1) ? 0.5 : std::uniform_real_distribution<double>(0.01, 1.0)(generator);
  Array<uint8_t> codes(size);
  Array<float> bucket_values(256), decoded(size), total(size);
  Check(HopTfSketchEncode(values.data(), values.type(), size, spacing, codes.data(), bucket_values.data(),
                          RandomThreads()) == HOP_TF_OK, "sketch encode");
  Check(HopTfSketchDecode(codes.data(), bucket_values.data(), size, decoded.data(), RandomThreads()) ==
            HOP_TF_OK, "sketch decode");
  for (int64_t i = 0; i < size; ++i) total.Set(i, others[i]);
  Check(HopTfSketchAccumulate(codes.data(), bucket_values.data(), size, total.data(), RandomThreads()) ==
            HOP_TF_OK, "sketch accumulate");
  bool finite = true;
  std::vector<double> sums(256), members(256);
  for (int64_t i = 0; i < size; ++i) {
    finite = finite && std::isfinite(values[i]);
    Check(Same(decoded.Get(i), bucket_values.Get(codes.Get(i))), "a decoded value");
    Check(Same(total.Get(i), others[i] + decoded.Get(i)), "a sum with a decoded value");
    sums[codes.Get(i)] += std::fabs(values[i]) < 0x1p-126f ? 0.0 : values[i];
    members[codes.Get(i)] += 1;
  }
  for (int64_t i = 1; finite && i < size; ++i) {
    const float a = values[i - 1], b = values[i];
    Check(!(a < b) || codes.Get(i - 1) <= codes.Get(i), "rising codes");
    Check(!(a > b) || codes.Get(i - 1) >= codes.Get(i), "rising codes");
  }
  for (int code = 0; code < 256; ++code) {
    Check(finite != std::isnan(bucket_values.Get(code)), "nan in, nan out");
    if (finite && code > 0) Check(bucket_values.Get(code - 1) <= bucket_values.Get(code), "rising bucket values");
    if (finite && members[code] > 0) {
      const double mean = sums[code] / members[code];
      Check(std::fabs(bucket_values.Get(code) - mean) <= 1e-6 * std::fabs(mean) + 1e-44, "a mean");
    }
  }
}

// What 8-bit codes mean.
float Dequantized(const Array<int8_t>& codes, const Array<float>& scales, int64_t index, int64_t block_size) {
  return static_cast<float>(codes.Get(index)) * scales.Get(index / block_size);
}

void CheckInt8(const std::vector<float>& values, const Array<int8_t>& codes, const Array<float>& scales,
               int64_t block_size) {
  for (int64_t begin = 0; begin < codes.size(); begin += block_size) {
    const int64_t end = std::min(begin + block_size, codes.size());
    bool finite = true;
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      finite = finite && std::isfinite(values[i]);
      largest = std::max(largest, std::fabs(values[i]));
    }
    const float scale = !finite ? std::nanf("") : largest < 0x1p-119f ? 0.0f : largest / 127.0f;
    Check(Same(scales.Get(begin / block_size), scale), "a scale");
    for (int64_t i = begin; i < end; ++i) {
      const float code = scale > 0 ? std::nearbyint(values[i] * (127.0f / largest)) : 0.0f;
      Check(static_cast<float>(codes.Get(i)) == code, "an 8-bit code");
    }
  }
}

void FuzzInt8(int64_t size) {
  const int64_t block_size = Uniform(0, 3) ? Uniform(1, 2000) : std::max<int64_t>(size, 1);
  const int64_t num_blocks = (size + block_size - 1) / block_size;
  Values first(size), second(size);
  Array<int8_t> codes(size), sum_codes(size);
  Array<float> scales(num_blocks), sum_scales(num_blocks), decoded(size), total(size);
  Check(HopTfInt8Encode(first.data(), first.type(), size, block_size, codes.data(), scales.data(), RandomThreads()) ==
            HOP_TF_OK, "int8 encode");
  std::vector<float> floats(size), sums(size);
  for (int64_t i = 0; i < size; ++i) floats[i] = first[i];
  CheckInt8(floats, codes, scales, block_size);

  Check(HopTfInt8Decode(codes.data(), scales.data(), size, block_size, decoded.data(), RandomThreads()) == HOP_TF_OK,
        "int8 decode");
  for (int64_t i = 0; i < size; ++i) total.Set(i, second[i]);
  Check(HopTfInt8Accumulate(codes.data(), scales.data(), size, block_size, total.data(), RandomThreads()) == HOP_TF_OK,
        "int8 accumulate");
  for (int64_t i = 0; i < size; ++i) {
    const float value = Dequantized(codes, scales, i, block_size);
    sums[i] = second[i] + value;
    Check(Same(decoded.Get(i), value), "an 8-bit value");
    Check(Same(total.Get(i), sums[i]), "an 8-bit sum");
  }
  Check(HopTfInt8Reduce(codes.data(), scales.data(), second.data(), second.type(), size, block_size, sum_codes.data(),
                        sum_scales.data(), RandomThreads()) == HOP_TF_OK, "int8 reduce");
  CheckInt8(sums, sum_codes, sum_scales, block_size);
  Check(HopTfInt8Reduce(codes.data(), scales.data(), second.data(), second.type(), size, block_size, codes.data(),
                        scales.data(), RandomThreads()) == HOP_TF_OK, "int8 reduce in place");
  CheckInt8(sums, codes, scales, block_size);
}

// Blocks of few bits, and a copy of them.
struct FewBits {
  FewBits(int64_t size, int64_t block_size, int bits)
      : scales((size + block_size - 1) / block_size * (4 / bits)), codes((size * bits + 7) / 8) {}

  bool operator==(const FewBits& other) const {
    for (int64_t i = 0; i < scales.size(); ++i) {
      if (scales.Get(i) != other.scales.Get(i)) return false;
    }
    for (int64_t i = 0; i < codes.size(); ++i) {
      if (codes.Get(i) != other.codes.Get(i)) return false;
    }
    return true;
  }

  Array<uint16_t> scales;
  Array<uint8_t> codes;
};

void CheckFewBits(const std::vector<float>& values, const Array<float>& decoded, int64_t block_size, int bits) {
  for (int64_t begin = 0; begin < decoded.size(); begin += block_size) {
    const int64_t end = std::min(begin + block_size, decoded.size());
    bool finite = true;
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      finite = finite && std::isfinite(values[i]);
      largest = std::max(largest, std::fabs(values[i]));
    }
    const double bound = (bits == 4 ? 0.15 : 1.01) * largest + 0x1p-119;
    for (int64_t i = begin; i < end; ++i) {
      const float value = decoded.Get(i);
      Check(std::isnan(value) == !finite, "whether a value of few bits is finite");
      Check(!finite || std::fabs(static_cast<double>(value) - values[i]) <= bound, "a value of few bits");
    }
  }
}

void FuzzFewBits(int64_t size) {
  const int64_t block_size = 8 * (Uniform(0, 1) ? Uniform(1, 16) : Uniform(1, 128));
  const int bits = static_cast<int>(2 * Uniform(1, 2));
  Values first(size), second(size);
  FewBits encoded(size, block_size, bits), reduced(size, block_size, bits), expected(size, block_size, bits);
  Array<float> decoded(size), total(size);
  Check(HopTfFewBitsEncode(first.data(), first.type(), size, block_size, bits, encoded.scales.data(),
                           encoded.codes.data(), RandomThreads()) == HOP_TF_OK, "few bits encode");
  Check(HopTfFewBitsDecode(encoded.scales.data(), encoded.codes.data(), size, block_size, bits, decoded.data(),
                           RandomThreads()) == HOP_TF_OK, "few bits decode");
  std::vector<float> floats(size);
  for (int64_t i = 0; i < size; ++i) floats[i] = first[i];
  CheckFewBits(floats, decoded, block_size, bits);

  for (int64_t i = 0; i < size; ++i) total.Set(i, second[i]);
  Check(HopTfFewBitsAccumulate(encoded.scales.data(), encoded.codes.data(), size, block_size, bits, total.data(),
                               RandomThreads()) == HOP_TF_OK, "few bits accumulate");
  for (int64_t i = 0; i < size; ++i) Check(Same(total.Get(i), second[i] + decoded.Get(i)), "a sum with few bits");
  Check(HopTfFewBitsEncode(total.data(), HOP_TF_FLOAT32, size, block_size, bits, expected.scales.data(),
                           expected.codes.data(), RandomThreads()) == HOP_TF_OK, "few bits encode a sum");
  Check(HopTfFewBitsReduce(encoded.scales.data(), encoded.codes.data(), second.data(), second.type(), size, block_size,
                           bits, reduced.scales.data(), reduced.codes.data(), RandomThreads()) == HOP_TF_OK,
        "few bits reduce");
  Check(reduced == expected, "a reduction of few bits");
  Check(HopTfFewBitsReduce(encoded.scales.data(), encoded.codes.data(), second.data(), second.type(), size, block_size,
                           bits, encoded.scales.data(), encoded.codes.data(), RandomThreads()) == HOP_TF_OK,
        "few bits reduce in place");
  Check(encoded == expected, "a reduction of few bits in place");
}

void FuzzTruncate16(int64_t size) {
  Values values(size), others(size);
  const int round = static_cast<int>(Uniform(0, 1));
  Array<uint16_t> halves(size);
  Array<float> decoded(size), total(size);
  Check(HopTfTruncate16Encode(values.data(), values.type(), size, round, halves.data(), RandomThreads()) == HOP_TF_OK,
        "truncate");
  Check(HopTfTruncate16Decode(halves.data(), size, decoded.data(), RandomThreads()) == HOP_TF_OK, "widen");
  for (int64_t i = 0; i < size; ++i) total.Set(i, others[i]);
  Check(HopTfTruncate16Accumulate(halves.data(), size, total.data(), RandomThreads()) == HOP_TF_OK, "add widened");
  for (int64_t i = 0; i < size; ++i) {
    const float value = values[i], result = decoded.Get(i);
    Check(Same(total.Get(i), others[i] + result), "a sum with a truncated value");
    if (!std::isfinite(value)) {
      Check(Same(result, value), "what is not finite");
    } else if (std::isfinite(result)) {
      const float step = std::max(std::ldexp(std::fabs(value), -7), 0x1p-133f);
      Check(std::fabs(value - result) <= (round ? step / 2 : step), "a truncated value");
      Check(round || std::fabs(result) <= std::fabs(value), "truncation towards zero");
    } else {
      Check(round && std::fabs(value) > 3.38e38f, "rounded to infinity");
    }
  }
}

template <typename T>
void FuzzSelect(int64_t size) {
  const T mask = std::numeric_limits<T>::max();
  Array<T> values(size);
  for (int64_t i = 0; i < size; ++i) values.Set(i, Uniform(0, 1) ? static_cast<T>(generator()) : T{0});
  Array<int64_t> indices(size);
  const int64_t bound = std::max<int64_t>(1, static_cast<T>(generator()) & mask), first = Uniform(0, 1000);
  int64_t number = -1, expected = 0;
  Check(HopTfSelectLarge(values.data(), sizeof(T), size, bound, first, indices.data(), &number) == HOP_TF_OK, "select");
  for (int64_t i = 0; i < size; ++i) {
    if ((values.Get(i) & mask) >= bound) Check(indices.Get(expected++) == first + i, "a selected index");
  }
  Check(number == expected, "the number of selected values");
}

using Bytes = Array<uint8_t>;

// Indices, and bytes of theirs that are changed: whatever is taken must be what is encoded to these bytes.
void FuzzGaps(int64_t num_values) {
  const int64_t one_in = int64_t{1} << Uniform(0, 10);
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < num_values; ++i) {
    if (Uniform(1, one_in) == 1) chosen.push_back(i);
  }
  const int64_t count = static_cast<int64_t>(chosen.size());
  const int shift = static_cast<int>(Uniform(0, 12));
  Array<int64_t> indices(count), decoded(count);
  for (int64_t i = 0; i < count; ++i) indices.Set(i, chosen[i]);
  const int64_t most = count ? (count + ((num_values - count) >> shift) + 7) / 8 : 0;
  Bytes remainders((count * shift + 7) / 8), quotients(most), again((count * shift + 7) / 8), again_quotients(most);
  int64_t num_bytes = -1, num_again = -1;
  Check(HopTfGapsEncode(indices.data(), count, num_values, shift, remainders.data(), quotients.data(), &num_bytes) ==
            HOP_TF_OK, "gaps encode");
  Check(num_bytes >= 0 && num_bytes <= most, "the length of quotients");
  Check(HopTfGapsDecode(remainders.data(), quotients.data(), num_bytes, count, num_values, shift, decoded.data()) ==
            HOP_TF_OK, "gaps decode");
  for (int64_t i = 0; i < count; ++i) Check(decoded.Get(i) == chosen[i], "an index");
  for (Bytes* bytes : {&remainders, &quotients}) {
    if (bytes->size() && Uniform(0, 1)) bytes->Set(Uniform(0, bytes->size() - 1), static_cast<uint8_t>(Uniform(0, 255)));
  }
  const int64_t num_taken = Uniform(0, 3) ? num_bytes : Uniform(0, most);
  if (HopTfGapsDecode(remainders.data(), quotients.data(), num_taken, count, num_values, shift, decoded.data()) !=
      HOP_TF_OK) {
    return;
  }
  Check(HopTfGapsEncode(decoded.data(), count, num_values, shift, again.data(), again_quotients.data(), &num_again) ==
            HOP_TF_OK && num_again == num_taken, "gaps encode once more");
  for (int64_t i = 0; i < again.size(); ++i) Check(again.Get(i) == remainders.Get(i), "remainders once more");
  for (int64_t i = 0; i < num_taken; ++i) Check(again_quotients.Get(i) == quotients.Get(i), "quotients once more");
}

void Fill(Bytes* bytes) {
  for (int64_t i = 0; i < bytes->size(); ++i) bytes->Set(i, static_cast<uint8_t>(Uniform(0, 255)));
}

// A frame's memory, and the two ends of a connection.
struct Side {
  Bytes text, start, checksum, key;
  std::vector<Bytes> parts;
  std::vector<HopTfPiece> pieces;
  std::vector<uint32_t> block_key;
  HopTfFrame frame = {};

  Side(int64_t num_text_bytes, const std::vector<int64_t>& lengths, int num_checksum_bytes)
      : text(num_text_bytes), start(HOP_TF_HEAD_BYTES + num_text_bytes), checksum(num_checksum_bytes), key(32),
        block_key(1024) {
    for (int64_t length : lengths) parts.emplace_back(length);
    for (Bytes& part : parts) pieces.push_back({part.data(), part.size()});
    frame.queue_bytes = static_cast<int32_t>(Uniform(1, num_text_bytes));
    frame.header_bytes = static_cast<int32_t>(num_text_bytes) - frame.queue_bytes;
    frame.checksum_bytes = num_checksum_bytes;
    frame.text = text.data();
    frame.payload = pieces.data();
    frame.num_pieces = static_cast<int64_t>(pieces.size());
    frame.start = start.data();
    frame.checksum = checksum.data();
    frame.key = key.data();
    frame.block_key = block_key.data();
  }

  std::vector<uint8_t> bytes() const {
    std::vector<uint8_t> all;
    const auto add = [&](const Bytes& part) {
      for (int64_t i = 0; i < part.size(); ++i) all.push_back(part.Get(i));
    };
    add(start);
    for (const Bytes& part : parts) add(part);
    add(checksum);
    return all;
  }
};

std::vector<int64_t> Cut(int64_t num_bytes) {
  std::vector<int64_t> lengths;
  for (int64_t left = num_bytes; left > 0; left -= lengths.back()) lengths.push_back(Uniform(1, left));
  return lengths;
}

// A frame that is sent, and one that is awaited at the other end of its connection, which are alike.
struct Connected {
  int sockets[2];
  std::unique_ptr<Side> out, in;

  explicit Connected(int64_t num_payload_bytes) {
    Check(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "no sockets");
    const int64_t num_text_bytes = Uniform(1, 300);
    const int num_checksum_bytes = 8 * static_cast<int>(Uniform(0, 1));
    out = std::make_unique<Side>(num_text_bytes, Cut(num_payload_bytes), num_checksum_bytes);
    in = std::make_unique<Side>(num_text_bytes, Cut(num_payload_bytes), num_checksum_bytes);
    for (Bytes* each : {&out->text, &out->key}) Fill(each);
    for (Bytes& part : out->parts) Fill(&part);
    for (uint32_t& word : out->block_key) word = static_cast<uint32_t>(generator());
    out->frame.sequence = static_cast<int64_t>(generator() >> 1);
    out->frame.number = static_cast<int64_t>(generator());
    out->frame.flags = static_cast<int32_t>(Uniform(0, 1));
    for (int64_t i = 0; i < num_text_bytes; ++i) in->text.Set(i, out->text.Get(i));
    for (int64_t i = 0; i < 32; ++i) in->key.Set(i, out->key.Get(i));
    in->block_key = out->block_key;
    in->frame.block_key = in->block_key.data();
    in->frame.queue_bytes = out->frame.queue_bytes;
    in->frame.header_bytes = out->frame.header_bytes;
    in->frame.sequence = out->frame.sequence;
    in->frame.number = out->frame.number;
    out->frame.is_outgoing = 1;
    out->frame.socket = sockets[1];
    in->frame.socket = sockets[0];
  }

  ~Connected() {
    for (int each : sockets) close(each);
  }
};

void Exchange(std::vector<HopTfFrame*> frames) {
  const HopTfStatus status = HopTfExchangeFrames(frames.data(), static_cast<int64_t>(frames.size()), 1, 5000);
  Check(status == HOP_TF_OK, "a frame was refused");
}

// Frames go and come in one call, however large they are.
void FuzzExchange(int64_t num_payload_bytes) {
  std::vector<std::unique_ptr<Connected>> connected;
  std::vector<HopTfFrame*> frames;
  for (int64_t i = Uniform(1, 3); i > 0; --i) {
    connected.push_back(std::make_unique<Connected>(num_payload_bytes * (i == 1 ? 50 : 1)));
    for (Side* side : {connected.back()->in.get(), connected.back()->out.get()}) frames.push_back(&side->frame);
  }
  std::shuffle(frames.begin(), frames.end(), generator);
  Exchange(frames);
  const auto is_outgoing = [](const HopTfFrame* frame) { return frame->is_outgoing != 0; };
  frames.erase(std::remove_if(frames.begin(), frames.end(), is_outgoing), frames.end());
  const auto is_begun = [](const HopTfFrame* frame) { return frame->state == HOP_TF_BEGUN; };
  if (std::any_of(frames.begin(), frames.end(), is_begun)) Exchange(frames);
  for (const auto& each : connected) {
    Check(each->out->frame.state == HOP_TF_COMPLETE && each->in->frame.state == HOP_TF_COMPLETE, "an exchange");
    Check(each->in->frame.flags == each->out->frame.flags, "whether it is to be acknowledged");
    Check(each->in->bytes() == each->out->bytes(), "what came of a frame");
  }
}

// All of a frame comes or a part, as it should be or changed, and then nothing more or the end.
void FuzzFrame(int64_t num_payload_bytes) {
  Connected connected(num_payload_bytes), sent(0);
  connected.out->frame.socket = sent.sockets[1];
  Exchange({&connected.out->frame});
  Check(connected.out->frame.state == HOP_TF_COMPLETE, "no room in a socket");
  std::vector<uint8_t> bytes = connected.out->bytes();
  const int64_t num_bytes = static_cast<int64_t>(bytes.size());
  const int64_t num_sent = Uniform(0, 1) ? num_bytes : Uniform(0, num_bytes - 1);
  const bool is_closed = Uniform(0, 1);
  HopTfFrameState expected = HOP_TF_COMPLETE;
  if (num_sent < num_bytes) expected = is_closed ? HOP_TF_ENDED : HOP_TF_BEGUN;
  const int64_t changed = Uniform(0, num_bytes - 1);
  if (Uniform(0, 1) && changed < num_sent) {
    bytes[static_cast<size_t>(changed)] ^= 1;
    if (changed < connected.in->start.size()) {
      expected = HOP_TF_OTHER;
    } else if (num_sent == num_bytes && connected.in->frame.checksum_bytes) {
      expected = HOP_TF_CORRUPT;
    }
  }
  Check(send(connected.sockets[1], bytes.data(), static_cast<size_t>(num_sent), 0) == num_sent, "no room in a socket");
  if (is_closed) shutdown(connected.sockets[1], SHUT_WR);
  Exchange({&connected.in->frame});
  Check(connected.in->frame.state == expected, "what became of a frame");
  Check(connected.in->frame.num_done <= num_sent, "more was read than was sent");
}

void CheckRefusals() {
  float value = 1;
  uint8_t code;
  int8_t signed_code;
  uint16_t half;
  float pair[2];
  const auto refused = [](HopTfStatus status) { Check(status == HOP_TF_INVALID_ARGUMENT, "a refusal"); };
  refused(HopTfSketchEncode(&value, HOP_TF_FLOAT32, -1, 0.5, &code, pair, 0));
  refused(HopTfSketchEncode(&value, HOP_TF_FLOAT32, int64_t{1} << 31, 0.5, &code, pair, 0));
  refused(HopTfSketchEncode(&value, HOP_TF_FLOAT32, 1, 0.0, &code, pair, 0));
  refused(HopTfSketchEncode(&value, HOP_TF_FLOAT32, 1, std::nan(""), &code, pair, 0));
  refused(HopTfInt8Encode(&value, HOP_TF_FLOAT32, 1, 0, &signed_code, pair, 0));
  refused(HopTfInt8Encode(&value, HOP_TF_FLOAT32, 1, INT64_MAX, &signed_code, pair, 0));
  refused(HopTfInt8Decode(&signed_code, pair, -5, 1, &value, 0));
  refused(HopTfFewBitsEncode(&value, HOP_TF_FLOAT32, 1, 12, 4, &half, &code, 0));
  refused(HopTfFewBitsEncode(&value, HOP_TF_FLOAT32, 1, 1032, 4, &half, &code, 0));
  refused(HopTfFewBitsEncode(&value, HOP_TF_FLOAT32, 1, 8, 3, &half, &code, 0));
  refused(HopTfFewBitsDecode(&half, &code, -1, 8, 4, &value, 0));
  refused(HopTfFewBitsAccumulate(&half, &code, 1, 0, 4, &value, 0));
  int64_t index = 5, length;
  refused(HopTfGapsEncode(&index, 1, 5, 0, &code, &code, &length));
  refused(HopTfGapsEncode(&index, 2, 1, 0, &code, &code, &length));
  refused(HopTfGapsEncode(&index, 1, 9, 48, &code, &code, &length));
  refused(HopTfGapsDecode(&code, &code, 1, -1, 9, 0, &index));
  refused(HopTfGapsDecode(&code, &code, -1, 0, 9, 0, &index));
  refused(HopTfGapsDecode(&code, &code, 0, 1, int64_t{1} << 49, 0, &index));
  refused(HopTfSelectLarge(&value, 4, 1, 0, 0, &index, &length));
  refused(HopTfSelectLarge(&value, 4, 1, int64_t{1} << 31, 0, &index, &length));
  refused(HopTfSelectLarge(&half, 2, 1, 1 << 15, 0, &index, &length));
  refused(HopTfSelectLarge(&value, 3, 1, 1, 0, &index, &length));
  refused(HopTfSelectLarge(&value, 4, -1, 1, 0, &index, &length));
  refused(HopTfSketchAccumulate(&code, pair, -1, &value, 0));
  refused(HopTfSketchAccumulate(&code, pair, int64_t{1} << 31, &value, 0));
  refused(HopTfTruncate16Accumulate(&half, -1, &value, 0));
  refused(HopTfTruncate16Accumulate(&half, int64_t{1} << 31, &value, 0));
}

void CheckNothing() {
  std::vector<float> buckets(256, 1);
  const auto done = [](HopTfStatus status) { Check(status == HOP_TF_OK, "a call with no values"); };
  done(HopTfSketchEncode(nullptr, HOP_TF_FLOAT32, 0, 0.5, nullptr, buckets.data(), 0));
  Check(buckets == std::vector<float>(256), "bucket values of no values");
  done(HopTfSketchDecode(nullptr, nullptr, 0, nullptr, 0));
  done(HopTfSketchAccumulate(nullptr, nullptr, 0, nullptr, 0));
  done(HopTfInt8Encode(nullptr, HOP_TF_FLOAT32, 0, 1, nullptr, nullptr, 0));
  done(HopTfInt8Decode(nullptr, nullptr, 0, 1, nullptr, 0));
  done(HopTfInt8Accumulate(nullptr, nullptr, 0, 1, nullptr, 0));
  done(HopTfInt8Reduce(nullptr, nullptr, nullptr, HOP_TF_FLOAT32, 0, 1, nullptr, nullptr, 0));
  int64_t length = -1;
  done(HopTfGapsEncode(nullptr, 0, 9, 0, nullptr, nullptr, &length));
  Check(length == 0, "the length of no gaps");
  done(HopTfGapsDecode(nullptr, nullptr, 0, 0, 0, 0, nullptr));
  done(HopTfSelectLarge(nullptr, 4, 0, 1, 0, nullptr, &length));
  done(HopTfFewBitsEncode(nullptr, HOP_TF_FLOAT32, 0, 64, 4, nullptr, nullptr, 0));
  done(HopTfFewBitsDecode(nullptr, nullptr, 0, 64, 2, nullptr, 0));
  done(HopTfFewBitsAccumulate(nullptr, nullptr, 0, 64, 4, nullptr, 0));
  done(HopTfFewBitsReduce(nullptr, nullptr, nullptr, HOP_TF_FLOAT32, 0, 64, 2, nullptr, nullptr, 0));
  done(HopTfTruncate16Encode(nullptr, HOP_TF_FLOAT32, 0, 0, nullptr, 0));
  done(HopTfTruncate16Decode(nullptr, 0, nullptr, 0));
  done(HopTfTruncate16Accumulate(nullptr, 0, nullptr, 0));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  generator.seed(std::strtoull(argv[1], nullptr, 10));
  const int rounds = std::atoi(argv[2]);
  CheckRefusals();
  CheckNothing();
  for (int round = 0; round < rounds; ++round) {
    // Sizes around those of tiles, and once in a while enough for several threads.
    const int64_t size = round % 50 == 49 ? Uniform(1 << 20, 5 << 18) : Uniform(0, Uniform(0, 1) ? 40 : 5000);
    FuzzSketch(size);
    FuzzInt8(size);
    FuzzFewBits(size);
    FuzzTruncate16(size);
    FuzzGaps(size);
    FuzzSelect<int16_t>(size);
    FuzzSelect<int32_t>(size);
    FuzzSelect<int64_t>(size);
    FuzzFrame(std::min<int64_t>(size, 20000));
    FuzzExchange(std::min<int64_t>(size, 20000));
  }
  std::printf("%d rounds\n", rounds);
  return 0;
}
