// The quantile sketch's steps between counting and encoding. RefineBins chooses the bins to refine, and SumParts adds
// up the demands of their parts. AssignKeys lists entries with members and finds their buckets. WriteBuckets computes
// the means of buckets and the code of each slot.
//
// Rounded sums are always added in the same order. If a block needs the sums of other blocks, it computes them itself.

#ifndef HOP_TF_OPS_CUDA_SKETCH_ASSIGN_CUH_
#define HOP_TF_OPS_CUDA_SKETCH_ASSIGN_CUH_

#include <cstdint>

#include "block_scan.cuh"
#include "sketch_bins.cuh"

namespace hop_tf {
namespace {

constexpr int kRunBlocks = 128;

struct SketchSettings {
  int64_t num_values;
  double spacing;
};

__device__ int ExponentOf(uint32_t pattern) { return static_cast<int>((pattern & kMagnitudeMask) >> 23); }

// The sum of the members.
__device__ double SumOf(const Entry& entry, uint32_t members, unsigned long long low_bits) {
  const double smallest = __uint_as_float(entry.pattern & kMagnitudeMask);
  const double magnitude = members * smallest + ldexp(static_cast<double>(low_bits), ExponentOf(entry.pattern) - 150);
  return entry.pattern >> 31 ? -magnitude : magnitude;
}

// count^spacing * width^(1 - spacing), where values differ in `shift` bits. Not inline, as some others: these kernels
// mostly wait for their instructions, so that few are better.
__noinline__ __device__ double ShareOf(uint32_t pattern, int shift, double members, double spacing) {
  if (spacing == 1.0) return members;
  const double density = spacing == 0.5 ? sqrt(members) : pow(members, spacing);
  return density * exp2((1.0 - spacing) * (ExponentOf(pattern) - 150 + shift));
}

// Of values that differ in `shift` bits.
__device__ Demand DemandOf(uint32_t pattern, int shift, uint64_t members, const SketchSettings& settings) {
  if (members == 0) return {0.0, 0};
  const bool is_point =
      shift < kBinShift && members * kNumCodes > static_cast<uint64_t>(kPointBuckets) * settings.num_values;
  if (is_point) return {0.0, Demand::kOccupied + Demand::kPoint};
  return {ShareOf(pattern, shift, static_cast<double>(members), settings.spacing), Demand::kOccupied};
}

// Of a bin that is not refined.
__device__ Demand DemandOfBin(uint32_t bin, const SketchSettings& settings, const SketchWorkspace& workspace) {
  const int shift = bin == 0 ? 0 : kBinShift;  // Zeros are all alike.
  return DemandOf(bin << kBinShift, shift, workspace.members[bin], settings);
}

// Neighbors among the parts of a refined bin, at most one for each thread of a block.
struct Run {
  uint32_t index;  // Among those of the bin.
  uint32_t place;
  uint32_t bin;
  int shift;

  __device__ Run(uint32_t run, const SketchWorkspace& workspace) : shift(workspace.PartShift()) {
    index = run % RunsPerPlace(shift);
    place = run / RunsPerPlace(shift);
    bin = workspace.bin_of_place[place];
  }

  __device__ bool HasThread() const { return threadIdx.x < PartsPerPlace(shift); }

  // The thread's part.
  __device__ Entry EntryOfThread() const {
    const uint32_t position = index * kListThreads + threadIdx.x;
    const uint32_t part = bin < kSignBin ? position : PartsPerPlace(shift) - 1 - position;
    return {bin << kBinShift | part << shift, SlotOfPlace(place, shift) + part};
  }

  __device__ Demand DemandOfThread(const SketchSettings& settings, const SketchWorkspace& workspace) const {
    if (!HasThread()) return {0.0, 0};
    const Entry entry = EntryOfThread();
    return DemandOf(entry.pattern, shift, workspace.members[entry.slot], settings);
  }
};

// Chooses the bins with more members than `most`, and gives them places in the order of the values.
__global__ void __launch_bounds__(kListThreads)
    RefineBins(uint32_t most, SketchSettings settings, SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  const auto is_refined = [&](uint32_t bin) { return bin != 0 && workspace->members[bin] > most; };
  const uint32_t position = blockIdx.x * kListThreads + threadIdx.x, bin = BinAt(position);
  // Each block counts the refined bins of the blocks before it, because waiting for them takes longer.
  uint32_t num_before = 0;
#pragma unroll 16
  for (uint32_t i = threadIdx.x; i < blockIdx.x * kListThreads; i += kListThreads) num_before += is_refined(BinAt(i));
  num_before = ScanBlock(num_before, Plus()).total;

  const bool refines = is_refined(bin);
  const Scan<uint32_t> refined = ScanBlock(static_cast<uint32_t>(refines), Plus());
  const uint32_t place = num_before + refined.before;
  if (refines) workspace->bin_of_place[place] = bin;
  workspace->place_of_bin[bin] = refines ? static_cast<uint16_t>(place) : kNotRefined;
  const Demand demand = refines ? Demand{0.0, 0} : DemandOfBin(bin, settings, *workspace);
  const Demand demand_of_block = ScanBlock(demand, Plus()).total;
  if (threadIdx.x != 0) return;
  workspace->demand_of_block[blockIdx.x] = demand_of_block;
  if (blockIdx.x == gridDim.x - 1) workspace->num_refined = num_before + refined.total;
}

__global__ void __launch_bounds__(kListThreads) SumParts(SketchSettings settings, SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  if (!workspace->HasRefined()) return;
  for (uint32_t run = blockIdx.x; run < workspace->NumRuns(); run += gridDim.x) {
    const Demand sum = ScanBlock(Run(run, *workspace).DemandOfThread(settings, *workspace), Plus()).total;
    if (threadIdx.x == 0) workspace->demand_of_run[run] = sum;
  }
}

// Demands up to neighbors in the order of the values: before the first, and the share through the last. A span begins
// where the previous one ends, or later. Rounded sums alone would not guarantee that.
struct Span {
  Demand before;
  double through;
};

// The span of a block of bins, and in `total` the demand of all bins. All sums use the same tree, with zeros for the
// blocks behind, so they rise from block to block. The whole block of threads calls this and the functions below.
__noinline__ __device__ Span SpanOfBlock(uint32_t block, const SketchWorkspace& workspace, Demand* total) {
  static_assert(kListBlocks + kMaxRuns <= kListThreads, "each block and each run needs a thread");
  Demand demand = {0.0, 0};
  uint32_t block_of_demand = 0;
  if (threadIdx.x < kListBlocks) {
    demand = workspace.demand_of_block[threadIdx.x];
    block_of_demand = threadIdx.x;
  } else if (threadIdx.x - kListBlocks < workspace.NumRuns()) {
    const uint32_t run = threadIdx.x - kListBlocks;
    demand = workspace.demand_of_run[run];
    block_of_demand = PositionOf(Run(run, workspace).bin) / kListThreads;
  }
  const uint32_t ends[] = {block, block + 1, kListBlocks};
  Demand before[3];
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    before[i] = ScanBlock(block_of_demand < ends[i] ? demand : Demand{0.0, 0}, Plus()).total;
  }
  *total = before[2];
  return {before[0], before[1].share};
}

// The span of the thread's demand, where those of the block's threads make up `whole`.
__noinline__ __device__ Span SpanOfThread(const Demand& demand, const Span& whole) {
  const Demand before = whole.before + ScanBlock(demand, Plus()).before;
  const double through = before.share + demand.share;
  const Scan<double> risen = ScanBlock(through, Max());
  const double highest = fmin(risen.through, whole.through);
  const double lowest = fmin(fmax(risen.before, whole.before.share), highest);
  const auto limit = [&](double share) { return fmin(fmax(share, lowest), highest); };
  return {{limit(before.share), before.counts}, limit(through)};
}

// Lists entries and assigns rising keys. Entries with the same key get the same code.
class KeyAssigner {
 public:
  __device__ KeyAssigner(uint32_t block, const SketchSettings& settings, SketchWorkspace* workspace)
      : settings_(settings), workspace_(workspace), block_(block), span_(SpanOfBlock(block, *workspace, &total_)) {}

  __device__ void AssignBins() const {
    const Demand demand = DemandOfThread();
    const Span span = SpanOfThread(demand, span_);
    const uint32_t bin = BinOfThread();
    if (!workspace_->IsRefined(bin)) Assign({bin << kBinShift, bin}, demand, span);
  }

  __device__ void AssignParts(const Run& run) const {
    __shared__ Span span_of_place, span_of_run;
    const Span span_of_bin = SpanOfThread(DemandOfThread(), span_);
    if (BinOfThread() == run.bin) span_of_place = span_of_bin;
    __syncthreads();
    const uint32_t num_runs = RunsPerPlace(run.shift);
    const Demand demand_of_run =
        threadIdx.x < num_runs ? workspace_->demand_of_run[run.place * num_runs + threadIdx.x] : Demand{0.0, 0};
    const Span span = SpanOfThread(demand_of_run, span_of_place);
    if (threadIdx.x == run.index) span_of_run = span;
    __syncthreads();
    const Demand demand = run.DemandOfThread(settings_, *workspace_);
    const Span span_of_part = SpanOfThread(demand, span_of_run);
    if (run.HasThread()) Assign(run.EntryOfThread(), demand, span_of_part);
  }

 private:
  __device__ uint32_t BinOfThread() const { return BinAt(block_ * kListThreads + threadIdx.x); }

  __device__ Demand DemandOfThread() const {
    const uint32_t bin = BinOfThread(), place = workspace_->place_of_bin[bin];
    if (place == kNotRefined) return DemandOfBin(bin, settings_, *workspace_);
    const uint32_t num_runs = RunsPerPlace(workspace_->PartShift());
    Demand sum = {0.0, 0};
#pragma unroll 4
    for (uint32_t i = 0; i < num_runs; ++i) sum = sum + workspace_->demand_of_run[place * num_runs + i];
    return sum;
  }

  __device__ void Assign(const Entry& entry, const Demand& demand, const Span& span) const {
    if (demand.NumOccupied() == 0) return;
    workspace_->entries[span.before.NumOccupied()] = entry;
    atomicAdd(&workspace_->num_entries_of_key[KeyOf(demand, span)], 1u);
  }

  __device__ int KeyOf(const Demand& demand, const Span& span) const {
    if (total_.NumOccupied() <= kNumCodes) return span.before.NumOccupied();
    // The bucket, with two more keys for every point before: one for the point, and one for the rest of its bucket.
    const int num_buckets = kNumCodes - 2 * total_.NumPoints();
    const double middle = fmin(span.before.share + demand.share / 2, span.through);
    const int bucket = min(static_cast<int>(middle / total_.share * num_buckets), num_buckets - 1);
    return bucket + 2 * span.before.NumPoints() + demand.NumPoints();
  }

  const SketchSettings settings_;
  SketchWorkspace* const workspace_;
  const uint32_t block_;
  Demand total_;
  const Span span_;
};

// The first blocks handle bins, the others the parts of refined ones.
__global__ void __launch_bounds__(kListThreads) AssignKeys(SketchSettings settings, SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  if (workspace->has_non_finite) return;
  if (blockIdx.x < kListBlocks) return KeyAssigner(blockIdx.x, settings, workspace).AssignBins();
  for (uint32_t i = blockIdx.x - kListBlocks; i < workspace->NumRuns(); i += kRunBlocks) {
    const Run run(i, *workspace);
    KeyAssigner(PositionOf(run.bin) / kListThreads, settings, workspace).AssignParts(run);
  }
}

// The code of a bin, and if that is the bin of zeros, of all those whose members count as zero.
__device__ void WriteCode(uint32_t slot, uint8_t code, SketchWorkspace* workspace) {
  workspace->codes[slot] = code;
  if (slot != 0) return;
  auto* const codes = reinterpret_cast<uint32_t*>(workspace->codes);
  for (uint32_t i = 0; i < kFirstNormalBin / 4; ++i) codes[i] = codes[kSignBin / 4 + i] = code * 0x01010101u;
}

// One block for each key. A key's code is the number of keys with members before it.
__global__ void __launch_bounds__(kListThreads) WriteBuckets(float* bucket_values, SketchWorkspace* workspace) {
  WaitForPreviousKernel();
  const int key = blockIdx.x, thread = threadIdx.x;
  if (workspace->has_non_finite) {
    if (thread == 0) bucket_values[key] = __uint_as_float(kNan);
    return;
  }
  const uint32_t num_entries = workspace->num_entries_of_key[key];
  if (num_entries == 0) return;
  const uint32_t num_entries_of_thread = thread < kNumCodes ? workspace->num_entries_of_key[thread] : 0;
  const int code = __syncthreads_count(num_entries_of_thread > 0 && thread < key);
  const bool is_last = !__syncthreads_or(num_entries_of_thread > 0 && thread > key);
  const uint32_t first = ScanBlock(thread < key ? num_entries_of_thread : 0, Plus()).total;

  double sum = 0, members = 0;
#pragma unroll 4
  for (uint32_t i = first + thread; i < first + num_entries; i += kListThreads) {
    const Entry entry = workspace->entries[i];
    sum += SumOf(entry, workspace->members[entry.slot], workspace->low_bits[entry.slot]);
    members += workspace->members[entry.slot];
  }
  for (uint32_t i = first + thread; i < first + num_entries; i += kListThreads) {
    WriteCode(workspace->entries[i].slot, static_cast<uint8_t>(code), workspace);
  }
  sum = ScanBlock(sum, Plus()).total;
  members = ScanBlock(members, Plus()).total;
  // Behind the last bucket its value is repeated.
  if (thread == code || (is_last && thread > code && thread < kNumCodes)) {
    bucket_values[thread] = static_cast<float>(sum / members);
  }
}

}  // namespace
}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_SKETCH_ASSIGN_CUH_
