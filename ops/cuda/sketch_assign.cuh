// The quantile sketch's third step: ListBins and ListParts list what has members in the order of the values, AssignKeys
// finds the buckets, WriteBuckets their means and the code of each bin.

#ifndef HOP_TF_OPS_CUDA_SKETCH_ASSIGN_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_ASSIGN_CUH_

#include <cstdint>

#include "block_scan.cuh"
#include "sketch_bins.cuh"

namespace hop_tf {
namespace {

constexpr int kListPartsBlocks = 64;
constexpr int kListPartsThreads = 256;

struct SketchSettings {
  int64_t num_values;
  double spacing;
};

// Lists bins that have members, and leaves room for the parts of refined ones.
__global__ void __launch_bounds__(kListThreads) ListBins(SketchWorkspace* workspace) {
  const uint32_t bin = BinAt(blockIdx.x * kListThreads + threadIdx.x);
  const uint32_t place = workspace->place_of_bin[bin];
  const uint32_t num_parts = PartsPerPlace(workspace->PartShift());
  const bool is_occupied = workspace->members[bin] > 0;
  uint32_t first = 0;
  for (uint32_t i = 0; i < blockIdx.x; ++i) {
    first += workspace->num_occupied[i] + workspace->num_refined_of_block[i] * num_parts;
  }
  const Scan<uint32_t> scan = ScanBlock(place > 0 ? num_parts : static_cast<uint32_t>(is_occupied), Plus());
  if (place > 0) {
    workspace->bin_of_place[place - 1] = bin;
    workspace->first_entry_of_place[place - 1] = first + scan.before;
  } else if (is_occupied) {
    workspace->entries[first + scan.before] = {bin << kBinShift, bin};
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) workspace->num_entries = first + scan.total;
}

// Lists the parts of refined bins, those without members too.
__global__ void __launch_bounds__(kListPartsThreads) ListParts(SketchWorkspace* workspace) {
  if (!workspace->HasRefined()) return;
  const int part_shift = workspace->PartShift();
  const uint32_t num_parts = PartsPerPlace(part_shift);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < workspace->num_refined * num_parts;
       i += gridDim.x * blockDim.x) {
    const uint32_t place = i / num_parts, part = i % num_parts;
    const uint32_t bin = workspace->bin_of_place[place];
    const uint32_t entry = workspace->first_entry_of_place[place] + (bin >= kSignBin ? num_parts - 1 - part : part);
    workspace->entries[entry] = {bin << kBinShift | part << part_shift, kNumBins + i};
  }
}

__device__ int ExponentOf(const Entry& entry) { return static_cast<int>((entry.pattern & kMagnitudeMask) >> 23); }

// The sum of the members.
__device__ double SumOf(const Entry& entry, uint32_t members, unsigned long long low_bits) {
  const double smallest = __uint_as_float(entry.pattern & kMagnitudeMask);
  const double magnitude = members * smallest + ldexp(static_cast<double>(low_bits), ExponentOf(entry) - 150);
  return entry.pattern >> 31 ? -magnitude : magnitude;
}

// count^spacing * width^(1 - spacing), where values differ in `shift` bits.
__device__ double ShareOf(const Entry& entry, int shift, double members, double spacing) {
  if (spacing == 1.0) return members;
  const double density = spacing == 0.5 ? sqrt(members) : pow(members, spacing);
  return density * exp2((1.0 - spacing) * (ExponentOf(entry) - 150 + shift));
}

// What an entry takes of the codes.
struct Demand {
  double share;      // Of the buckets.
  int num_points;    // 1 for a point, which takes a code and may cut a bucket in two.
  int num_occupied;  // 1 if there are members.
};

__device__ Demand DemandOf(const Entry& entry, int part_shift, const SketchSettings& settings,
                           const SketchWorkspace& workspace) {
  const uint64_t members = workspace.members[entry.slot];
  if (members == 0) return {0.0, 0, 0};
  const int shift = entry.slot == 0 ? 0 : entry.slot < kNumBins ? kBinShift : part_shift;  // Zeros are all alike.
  const bool is_point =
      shift < kBinShift && members * kNumCodes > static_cast<uint64_t>(kPointBuckets) * settings.num_values;
  if (is_point) return {0.0, 1, 1};
  return {ShareOf(entry, shift, static_cast<double>(members), settings.spacing), 0, 1};
}

// The whole block calls it, as it does all functions of this step that follow.
__device__ Demand TotalDemand(int part_shift, const SketchSettings& settings, const SketchWorkspace& workspace) {
  Demand sum = {0.0, 0, 0};
  for (uint32_t i = threadIdx.x; i < workspace.num_entries; i += blockDim.x) {
    const Demand demand = DemandOf(workspace.entries[i], part_shift, settings, workspace);
    sum.share += demand.share;
    sum.num_points += demand.num_points;
    sum.num_occupied += demand.num_occupied;
  }
  return {ScanBlock(sum.share, Plus()).total, ScanBlock(sum.num_points, Plus()).total,
          ScanBlock(sum.num_occupied, Plus()).total};
}

// Gives keys to entries, as many at a time as there are threads, in order.
class KeyAssigner {
 public:
  __device__ explicit KeyAssigner(const Demand& total) : total_(total) {}

  __device__ int NextKey(const Demand& demand) {
    return total_.num_occupied <= kNumCodes ? CountOccupied(demand) : FindBucket(demand);
  }

 private:
  // Codes for all.
  __device__ int CountOccupied(const Demand& demand) {
    const Scan<int> occupied = ScanBlock(demand.num_occupied, Plus());
    const int key = min(before_.num_occupied + occupied.before, kNumCodes - 1);
    before_.num_occupied += occupied.total;
    return key;
  }

  // The bucket, with two more keys for every point before: one for the point, and one for the rest of its bucket.
  __device__ int FindBucket(const Demand& demand) {
    const int num_buckets = kNumCodes - 2 * total_.num_points;
    const Scan<int> points = ScanBlock(demand.num_points, Plus());
    const Scan<double> shares = ScanBlock(demand.share, Plus());
    const double middle = before_.share + shares.before + demand.share / 2;
    // Rounded sums of a tree need not rise.
    const Scan<double> risen = ScanBlock(middle, Max());
    const double place = fmax(last_middle_, risen.through) / total_.share * num_buckets;
    const int key = min(static_cast<int>(place), num_buckets - 1) + 2 * (before_.num_points + points.before) +
                    demand.num_points;
    before_.num_points += points.total;
    before_.share += shares.total;
    last_middle_ = fmax(last_middle_, risen.total);
    return key;
  }

  const Demand total_;
  Demand before_ = {0.0, 0, 0};
  double last_middle_ = 0.0;
};

// Writes where each key's entries begin; keys rise from entry to entry.
__device__ void FindFirstEntries(SketchWorkspace* workspace) {
  const uint32_t num_entries = workspace->num_entries;
  for (uint32_t i = threadIdx.x; i < num_entries; i += blockDim.x) {
    const int previous = i == 0 ? -1 : workspace->keys[i - 1];
    for (int key = workspace->keys[i]; key > previous; --key) workspace->first_entry_of_key[key] = i;
  }
  const int last = num_entries == 0 ? -1 : workspace->keys[num_entries - 1];
  for (int key = last + 1 + threadIdx.x; key <= kNumCodes; key += blockDim.x) {
    workspace->first_entry_of_key[key] = num_entries;
  }
}

// One block.
__global__ void __launch_bounds__(kListThreads) AssignKeys(SketchSettings settings, SketchWorkspace* workspace) {
  if (workspace->has_non_finite) return;
  if (threadIdx.x < kNumCodes) workspace->key_has_members[threadIdx.x] = 0;
  const int part_shift = workspace->PartShift();
  const uint32_t num_entries = workspace->num_entries;
  KeyAssigner assigner(TotalDemand(part_shift, settings, *workspace));
  for (uint32_t first = 0; first < num_entries; first += blockDim.x) {
    const uint32_t i = first + threadIdx.x;
    const bool is_entry = i < num_entries;
    const Demand demand =
        is_entry ? DemandOf(workspace->entries[i], part_shift, settings, *workspace) : Demand{0.0, 0, 0};
    const int key = assigner.NextKey(demand);
    if (is_entry) workspace->keys[i] = static_cast<uint8_t>(key);
    if (demand.num_occupied > 0) workspace->key_has_members[key] = 1;
  }
  __syncthreads();
  FindFirstEntries(workspace);
}

// The code of a bin, and if that is the bin of zeros, of all those whose members count as zero.
__device__ void WriteCode(uint32_t slot, uint8_t code, SketchWorkspace* workspace) {
  workspace->codes[slot] = code;
  if (slot != 0) return;
  for (uint32_t bin = 0; bin < kFirstNormalBin; ++bin) {
    workspace->codes[bin] = workspace->codes[kSignBin + bin] = code;
  }
}

// One block for each key. A key's code is the number of keys with members before it.
__global__ void __launch_bounds__(kNumCodes) WriteBuckets(float* bucket_values, SketchWorkspace* workspace) {
  const int key = blockIdx.x, thread = threadIdx.x;
  if (workspace->has_non_finite) {
    if (thread == 0) bucket_values[key] = __uint_as_float(kNan);
    return;
  }
  const bool has_members = workspace->key_has_members[thread] != 0;
  const int code = __syncthreads_count(has_members && thread < key);
  const bool is_last = !__syncthreads_or(has_members && thread > key);
  if (!workspace->key_has_members[key]) return;

  double sum = 0, members = 0;
  const uint32_t end = workspace->first_entry_of_key[key + 1];
  for (uint32_t i = workspace->first_entry_of_key[key] + thread; i < end; i += blockDim.x) {
    const Entry entry = workspace->entries[i];
    sum += SumOf(entry, workspace->members[entry.slot], workspace->low_bits[entry.slot]);
    members += workspace->members[entry.slot];
    WriteCode(entry.slot, static_cast<uint8_t>(code), workspace);
  }
  sum = ScanBlock(sum, Plus()).total;
  members = ScanBlock(members, Plus()).total;
  // Behind the last bucket its value is repeated.
  if (thread == code || (is_last && thread > code)) {
    bucket_values[thread] = static_cast<float>(sum / members);
  }
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_ASSIGN_CUH_
