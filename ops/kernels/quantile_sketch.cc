// The quantile sketch.
//
//   1. Count: one bin for each upper half of a float32 pattern. A counter also adds up the lower halves of its members;
//      within a bin a value is a linear function of its lower half, so that the sum is exact and independent of order.
//      Most bins are empty: after the counting, only blocks of bins that hold a value are looked at.
//   2. Refine: bins that hold too much to go into one bucket unseen are divided by the next 9 to 16 bits, the more the
//      fewer they are, and counted again.
//   3. Assign: bins, in the order of their values, make up buckets. A bucket's value is the mean of its members.
//   4. Encode: one look-up in a table for each value.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "checks.h"
#include "constants.h"
#include "float_bits.h"
#include "hop_tf_kernels.h"
#include "parallel.h"
#include "tiles.h"

namespace hop_tf {
namespace {

constexpr int64_t kMinValuesPerThread = 1 << 19;

// A counter is one word, to which one addition counts a member and its low bits.
constexpr int kCountShift = 40;
constexpr int64_t kMostCountedTogether = (int64_t{1} << (64 - kCountShift)) - 1;

struct Count {
  uint64_t members = 0;
  uint64_t low_bits = 0;  // Their sum.

  void Add(uint64_t counter) {
    members += counter >> kCountShift;
    low_bits += counter & ((uint64_t{1} << kCountShift) - 1);
  }
};

// 2^exponent, for exponents of normal numbers.
inline double PowerOfTwo(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}

// A bin, or a part of a refined one. Not empty.
struct Bin {
  uint32_t pattern;  // What the members have in common; low bits 0.
  int shift;         // How many low bits they differ in.
  Count count;
  int code = 0;
  double share = 0;

  int Exponent() const { return static_cast<int>((pattern & kMagnitudeMask) >> 23); }

  double Sum() const {
    const double smallest = FromBits(pattern & kMagnitudeMask);
    const double magnitude = static_cast<double>(count.members) * smallest +
                             static_cast<double>(count.low_bits) * PowerOfTwo(Exponent() - 150);
    return pattern >> 31 ? -magnitude : magnitude;
  }

  int Width() const { return Exponent() - 150 + shift; }  // Its logarithm.
};

// count^spacing * width^(1 - spacing)
class Shares {
 public:
  explicit Shares(double spacing) : spacing_(spacing) {}

  double Of(const Bin& bin) {
    const double members = static_cast<double>(bin.count.members);
    if (spacing_ == 1.0) return members;
    const double density = spacing_ == 0.5 ? std::sqrt(members) : std::pow(members, spacing_);
    if (bin.Width() != width_) {  // Neighbors are mostly alike.
      width_ = bin.Width();
      power_ = std::exp2((1.0 - spacing_) * width_);
    }
    return density * power_;
  }

 private:
  const double spacing_;
  int width_ = 0;
  double power_ = 1;
};

// Counts of bins, most of which are empty: what is done for all bins is done for blocks that hold something.
class Histogram {
 public:
  static constexpr uint32_t kBlockBins = 16;

  // Empties it. `num_bins` is a multiple of the block's.
  void Reset(uint32_t num_bins) {
    for (size_t block = 0; block < is_used_.size(); ++block) {
      if (is_used_[block]) std::fill_n(counts_.begin() + block * kBlockBins, kBlockBins, Count{});
    }
    is_used_.assign(num_bins / kBlockBins, false);
    if (counts_.size() < num_bins) counts_.resize(num_bins);
  }

  // Adds up what was counted, and sets the counters to 0.
  void Take(uint64_t* counters) {
    for (size_t block = 0; block < is_used_.size(); ++block, counters += kBlockBins) {
      uint64_t any = 0;
      for (uint32_t i = 0; i < kBlockBins; ++i) any |= counters[i];
      if (any == 0) continue;
      is_used_[block] = true;
      Count* const counts = &counts_[block * kBlockBins];
      for (uint32_t i = 0; i < kBlockBins; ++i) counts[i].Add(std::exchange(counters[i], 0));
    }
  }

  // Calls body(bin) for all bins of [begin, end) that hold something, and some more; both are multiples of the block's.
  template <typename Body>
  void ForUsed(uint32_t begin, uint32_t end, const Body& body) const {
    for (uint32_t first = begin; first < end; first += kBlockBins) {
      if (!is_used_[first / kBlockBins]) continue;
      for (uint32_t i = 0; i < kBlockBins; ++i) body(first + i);
    }
  }

  template <typename Body>
  void ForUsedBackwards(uint32_t begin, uint32_t end, const Body& body) const {
    for (uint32_t last = end; last > begin; last -= kBlockBins) {
      if (!is_used_[last / kBlockBins - 1]) continue;
      for (uint32_t i = 1; i <= kBlockBins; ++i) body(last - i);
    }
  }

  void AddMembers(uint32_t bin, uint64_t members) {
    is_used_[bin / kBlockBins] = true;
    counts_[bin].members += members;
  }

  uint32_t NumBins() const { return static_cast<uint32_t>(is_used_.size()) * kBlockBins; }
  Count& operator[](uint32_t bin) { return counts_[bin]; }
  const Count& operator[](uint32_t bin) const { return counts_[bin]; }

 private:
  std::vector<Count> counts_;
  std::vector<uint8_t> is_used_;  // For each block.
};

// The ranges of bins that are looked at begin and end with a block.
static_assert(kSignBin % Histogram::kBlockBins == 0 && kFirstNormalBin % Histogram::kBlockBins == 0 &&
              kInfinityBin % Histogram::kBlockBins == 0);

// Where the codes of a bin's values are, one behind the other in a table. The code of a value is at `first` plus the
// value's low bits, without the last `shift` of them.
class Place {
 public:
  Place() = default;
  Place(uint32_t first, int shift) : word_(first << kShiftBits | shift) {}

  uint32_t Of(uint32_t low) const { return (word_ >> kShiftBits) + (low >> (word_ & ((1u << kShiftBits) - 1))); }
  bool IsRefined() const { return word_ >= kNumBins << kShiftBits; }

 private:
  static constexpr int kShiftBits = 5;
  uint32_t word_ = kBinShift;
};

// Memory that is used again in the next call on the same thread: fresh pages would cost more than the work on small arrays.
// Of tables by bin, what belongs to bins without a value is not looked at, and not set.
struct Scratch {
  std::vector<std::vector<uint64_t>> counters;  // For each part of the values; all 0 between uses.
  Histogram bin_counts;
  std::vector<Place> places = std::vector<Place>(kNumBins);  // That of a bin that is not refined is its number.
  std::vector<uint32_t> refined;  // Bins.
  Histogram part_counts;          // Of the parts of refined bins.
  std::vector<Bin> bins;
  std::vector<uint8_t> table;  // The codes of bins and of parts.

  void Shrink() {
    if (counters.size() > 1) counters.resize(1);
  }
};

// Counting and looking up take long enough between two tiles for the processor's own prefetching to stop.
constexpr int kFloatsPerCacheLine = 16;

// With fewer than this part of zeros, it takes longer to spread them than to wait for additions to their counter.
constexpr int kManyZeros = 32;

// The halves of a pattern. To load them takes less than to divide the pattern.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
inline uint32_t UpperHalf(const void* patterns, int i) { return Load<uint16_t>(patterns, 2 * i + 1); }
inline uint32_t LowerHalf(const void* patterns, int i) { return Load<uint16_t>(patterns, 2 * i); }
static_assert(kBinShift == 16);

// Calls body(i) for i in [0, count), and meanwhile brings `count` floats at `next` into the cache.
template <typename Body>
inline void ForEachWithPrefetch(int count, const void* next, const Body& body) {
  int i = 0;
  while (i + kFloatsPerCacheLine <= count) {
    __builtin_prefetch(At(static_cast<const float*>(next), i));
#pragma GCC unroll 16
    for (int j = 0; j < kFloatsPerCacheLine; ++j) body(i + j);
    i += kFloatsPerCacheLine;
  }
  for (; i < count; ++i) body(i);
}

class SketchEncoder {
 public:
  SketchEncoder(const void* values, HopTfType type, int64_t num_values, double spacing, int num_threads,
                Scratch& scratch)
      : values_(values),
        type_(type),
        num_values_(num_values),
        spacing_(spacing),
        num_threads_(NumParts(num_values, kMinValuesPerThread, num_threads)),
        scratch_(scratch) {}

  void Encode(uint8_t* codes, float* bucket_values) {
    if (!CountBins()) {
      for (int i = 0; i < kNumCodes; ++i) Store(bucket_values, i, std::numeric_limits<float>::quiet_NaN());
      std::fill_n(codes, num_values_, uint8_t{0});
      return;
    }
    RefineBins();
    ListBins();
    AssignCodes();
    WriteBucketValues(bucket_values);
    WriteCodes(codes);
  }

 private:
  // Calls body(begin, count, floats, next) for tiles of [begin, end); `next` is where the following tile lies.
  template <typename Body>
  void ForTiles(int64_t begin, int64_t end, const Body& body) const {
    float tile[kTileValues];
    for (; begin < end; begin += kTileValues) {
      const int count = static_cast<int>(std::min<int64_t>(end - begin, kTileValues));
      const void* floats = At(static_cast<const float*>(values_), begin);
      if (type_ != HOP_TF_FLOAT32) {
        LoadTile(values_, type_, begin, count, tile);
        floats = tile;
      }
      // Beyond the end of the array nothing is read.
      const bool has_next = type_ == HOP_TF_FLOAT32 && begin + 2 * kTileValues <= num_values_;
      body(begin, count, floats, has_next ? At(static_cast<const float*>(floats), kTileValues) : floats);
    }
  }

  // Counts all values. add(patterns, count, next, counters) counts a tile of patterns.
  template <typename Add>
  void CountAll(Histogram& counts, const Add& add) {
    auto& counters = scratch_.counters;
    if (counters.size() < static_cast<size_t>(num_threads_)) counters.resize(num_threads_);
    for (auto& each : counters) each.resize(std::max<size_t>(each.size(), counts.NumBins()));
    std::mutex mutex;
    ParallelFor(num_values_, num_threads_, kTileValues, [&](int part, int64_t begin, int64_t end) {
      constexpr int64_t kStep = kMostCountedTogether / kTileValues * kTileValues;
      for (; begin < end; begin += kStep) {
        ForTiles(begin, std::min(begin + kStep, end), [&](int64_t, int count, const void* floats, const void* next) {
          add(floats, count, next, counters[part].data());
        });
        const std::lock_guard<std::mutex> lock(mutex);
        counts.Take(counters[part].data());
      }
    });
  }

  // Returns whether all values are finite.
  bool CountBins() {
    auto& counts = scratch_.bin_counts;
    counts.Reset(kNumBins);
    CountAll(counts, [](const void* patterns, int count, const void* next, uint64_t* counters) {
      uint32_t spread[kTileValues];
      if (CountZeros(patterns, count) > count / kManyZeros) {
        SpreadZeros(patterns, count, spread);
        patterns = spread;
      }
      ForEachWithPrefetch(count, next, [=](int i) {
        counters[UpperHalf(patterns, i)] += (uint64_t{1} << kCountShift) | LowerHalf(patterns, i);
      });
    });
    uint64_t num_zeros = 0, num_infinite = 0;
    for (const uint32_t sign : {0u, kSignBin}) {
      counts.ForUsed(sign, sign + kFirstNormalBin, [&](uint32_t bin) {
        num_zeros += std::exchange(counts[bin], {}).members;
      });
      counts.ForUsed(sign + kInfinityBin, sign + kSignBin, [&](uint32_t bin) { num_infinite += counts[bin].members; });
    }
    counts.AddMembers(0, num_zeros);
    return num_infinite == 0;  // Nor nan.
  }

  void RefineBins() {
    const uint64_t most = std::max<uint64_t>(1, num_values_ / kRefineFraction);
    auto& refined = scratch_.refined;
    refined.clear();
    scratch_.bin_counts.ForUsed(0, kNumBins, [&](uint32_t bin) {
      scratch_.places[bin] = Place(bin, kBinShift);
      if (bin != 0 && scratch_.bin_counts[bin].members > most) refined.push_back(bin);
    });
    if (refined.empty()) return;
    while (refined.size() * NumPartsOfBin() > kMaxParts) ++part_shift_;
    for (size_t i = 0; i < refined.size(); ++i) {
      scratch_.places[refined[i]] = Place(kNumBins + i * PartsStride(), part_shift_);
    }
    scratch_.part_counts.Reset(refined.size() * PartsStride());
    CountAll(scratch_.part_counts, [this](const void* patterns, int count, const void* next, uint64_t* counters) {
      CountParts(patterns, count, next, counters);
    });
  }

  void CountParts(const void* patterns, int count, const void* next, uint64_t* counters) const {
    const Place* const places = scratch_.places.data();
    const uint32_t low_mask = (1u << part_shift_) - 1;
    uint32_t kept[kTileValues];
    int num_kept = 0;
    ForEachWithPrefetch(count, next, [&](int i) {
      kept[num_kept] = Load<uint32_t>(patterns, i);
      num_kept += places[UpperHalf(patterns, i)].IsRefined();
    });
#pragma GCC unroll 8
    for (int i = 0; i < num_kept; ++i) {
      const uint32_t low = LowerHalf(kept, i);
      counters[places[UpperHalf(kept, i)].Of(low) - kNumBins] += (uint64_t{1} << kCountShift) | (low & low_mask);
    }
  }

  uint32_t NumPartsOfBin() const { return 1u << (kBinShift - part_shift_); }

  // If the same parts of all bins were powers of two apart, they would fall into the same few lines of the cache.
  uint32_t PartsStride() const { return NumPartsOfBin() + Histogram::kBlockBins; }

  // Lists what is not empty, in the order of the values.
  void ListBins() {
    scratch_.bins.clear();
    const auto list = [this](uint32_t bin) { ListBin(bin); };
    scratch_.bin_counts.ForUsedBackwards(kSignBin, kNumBins, list);
    scratch_.bin_counts.ForUsed(0, kSignBin, list);
  }

  void ListBin(uint32_t bin) {
    const uint32_t pattern = bin << kBinShift;
    if (!scratch_.places[bin].IsRefined()) {
      ListIfOccupied({pattern, bin == 0 ? 0 : kBinShift, scratch_.bin_counts[bin]});  // Zeros are all alike.
      return;
    }
    const uint32_t first = scratch_.places[bin].Of(0) - kNumBins, end = first + NumPartsOfBin();
    const auto list = [&](uint32_t part) {
      ListIfOccupied({pattern | (part - first) << part_shift_, part_shift_, scratch_.part_counts[part]});
    };
    if (bin >= kSignBin) {
      scratch_.part_counts.ForUsedBackwards(first, end, list);
    } else {
      scratch_.part_counts.ForUsed(first, end, list);
    }
  }

  void ListIfOccupied(const Bin& bin) {
    if (bin.count.members > 0) scratch_.bins.push_back(bin);
  }

  bool IsPoint(const Bin& bin) const {
    return bin.shift < kBinShift &&
           bin.count.members * kNumCodes > static_cast<uint64_t>(kPointBuckets) * num_values_;
  }

  void AssignCodes() {
    auto& bins = scratch_.bins;
    if (bins.size() <= size_t{kNumCodes}) {
      for (size_t i = 0; i < bins.size(); ++i) bins[i].code = static_cast<int>(i);
      return;
    }
    Shares shares(spacing_);
    double total = 0;
    int num_points = 0;
    for (Bin& bin : bins) {
      if (IsPoint(bin)) {
        ++num_points;
      } else {
        total += bin.share = shares.Of(bin);
      }
    }
    // A point takes a code, and may cut a bucket in two.
    const int num_buckets = kNumCodes - 2 * num_points;
    double before = 0;
    int code = -1, last_bucket = -1, next_point = num_buckets;
    for (Bin& bin : bins) {
      int bucket = next_point;
      if (IsPoint(bin)) {
        ++next_point;
      } else {
        bucket = std::min(static_cast<int>((before + bin.share / 2) / total * num_buckets), num_buckets - 1);
        before += bin.share;
      }
      if (bucket != last_bucket) ++code;
      last_bucket = bucket;
      bin.code = code;
    }
  }

  void WriteBucketValues(float* bucket_values) const {
    double sums[kNumCodes] = {}, members[kNumCodes] = {};
    for (const Bin& bin : scratch_.bins) {
      sums[bin.code] += bin.Sum();
      members[bin.code] += static_cast<double>(bin.count.members);
    }
    float value = 0;
    for (int i = 0; i < kNumCodes; ++i) {
      if (members[i] > 0) value = static_cast<float>(sums[i] / members[i]);
      Store(bucket_values, i, value);
    }
  }

  void WriteCodes(uint8_t* codes) {
    auto& table = scratch_.table;
    const size_t size = kNumBins + scratch_.refined.size() * PartsStride();
    if (table.size() < size) table.resize(size);
    for (const Bin& bin : scratch_.bins) {
      table[scratch_.places[bin.pattern >> kBinShift].Of(bin.pattern & kLowMask)] = static_cast<uint8_t>(bin.code);
    }
    for (const uint32_t sign : {0u, kSignBin}) std::fill_n(&table[sign], kFirstNormalBin, table[0]);
    ParallelFor(num_values_, num_threads_, kTileValues, [&](int, int64_t begin, int64_t end) {
      ForTiles(begin, end, [&](int64_t first, int count, const void* floats, const void* next) {
        if (scratch_.refined.empty()) {
          LookUp(floats, count, next, table.data(), codes + first);
        } else {
          LookUpRefined(floats, count, next, scratch_.places.data(), table.data(), codes + first);
        }
      });
    });
  }

  // Bytes may alias anything, pointers in memory included: in these loops every pointer is a local variable.

  static void LookUp(const void* floats, int count, const void* next, const uint8_t* table, uint8_t* codes) {
    ForEachWithPrefetch(count, next, [=](int i) { codes[i] = table[UpperHalf(floats, i)]; });
  }

  // Without a branch, which would be slower where values are refined or not by chance.
  static void LookUpRefined(const void* floats, int count, const void* next, const Place* places, const uint8_t* table,
                            uint8_t* codes) {
    ForEachWithPrefetch(count, next, [=](int i) {
      codes[i] = table[places[UpperHalf(floats, i)].Of(LowerHalf(floats, i))];
    });
  }

  const void* const values_;
  const HopTfType type_;
  const int64_t num_values_;
  const double spacing_;
  const int num_threads_;
  Scratch& scratch_;

  int part_shift_ = 0;  // A part is what values have in common above so many bits.
};

void LookUpValues(const uint8_t* codes, int64_t count, const float* table, void* values) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < count; ++i) Store(values, i, table[codes[i]]);
}

void AddLookedUpValues(const uint8_t* codes, int64_t count, const float* table, void* sums) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < count; ++i) Store(sums, i, Load<float>(sums, i) + table[codes[i]]);
}

// Calls body(begin, end, table) for parts of the values; `table` holds the value of every code.
template <typename Body>
HopTfStatus WithTable(const float* bucket_values, int64_t num_values, int num_threads, const Body& body) {
  if (!IsSize(num_values)) return HOP_TF_INVALID_ARGUMENT;
  if (num_values == 0) return HOP_TF_OK;
  return Guarded([&] {
    float table[kNumCodes];  // Aligned.
    std::memcpy(table, bucket_values, sizeof(table));
    ParallelFor(num_values, NumParts(num_values, kMinValuesPerThread, num_threads), kTileValues,
                [&](int, int64_t begin, int64_t end) { body(begin, end, table); });
  });
}

}  // namespace
}  // namespace hop_tf

using namespace hop_tf;

HopTfStatus HopTfSketchEncode(const void* values, HopTfType type, int64_t num_values, double spacing, uint8_t* codes,
                              float* bucket_values, int num_threads) {
  if (!IsSize(num_values) || !IsType(type) || !(spacing > 0 && spacing <= 1)) return HOP_TF_INVALID_ARGUMENT;
  return Guarded([&] {
    static thread_local Scratch scratch;  // What one thread needs stays allocated for the next call, a few megabytes.
    SketchEncoder(values, type, num_values, spacing, num_threads, scratch).Encode(codes, bucket_values);
    scratch.Shrink();
  });
}

HopTfStatus HopTfSketchDecode(const uint8_t* codes, const float* bucket_values, int64_t num_values, float* values,
                              int num_threads) {
  return WithTable(bucket_values, num_values, num_threads, [&](int64_t begin, int64_t end, const float* table) {
    LookUpValues(codes + begin, end - begin, table, At(values, begin));
  });
}

HopTfStatus HopTfSketchAccumulate(const uint8_t* codes, const float* bucket_values, int64_t num_values,
                                  float* accumulator, int num_threads) {
  return WithTable(bucket_values, num_values, num_threads, [&](int64_t begin, int64_t end, const float* table) {
    AddLookedUpValues(codes + begin, end - begin, table, At(accumulator, begin));
  });
}
