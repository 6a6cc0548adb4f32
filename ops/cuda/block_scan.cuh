// Prefix sums over the threads of a block.

#ifndef HOP_TF_OPS_CUDA_BLOCK_SCAN_CUH_
#define HOP_TF_OPS_CUDA_BLOCK_SCAN_CUH_

#include <cstdint>

namespace hop_tf {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarpSize = 32;

struct Plus {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Max {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// The value of the lane that is `distance` before; the lane's own value if there is no such lane.
template <typename T>
__device__ T ShuffleUp(T value, int distance) {
  return __shfl_up_sync(kAllLanes, value, distance);
}

template <typename T>
struct Scan {
  T before;   // Of the threads before this one; T{} for the first.
  T through;  // Of those, and this one.
  T total;    // Of all.
};

// The scan of a warp without its total. T{} must be neutral.
template <typename T, typename Combine>
__device__ Scan<T> ScanWarp(T value, const Combine& combine) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const T other = ShuffleUp(value, distance);
    if (lane >= distance) value = combine(other, value);
  }
  const T before = ShuffleUp(value, 1);
  return {lane == 0 ? T{} : before, value, T{}};
}

// Every thread of the block calls it, in warps that are whole. The order of operations depends on nothing but the
// number of threads, so that rounded sums are always the same.
template <typename T, typename Combine>
__device__ Scan<T> ScanBlock(T value, const Combine& combine) {
  __shared__ T through_warp[kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, num_warps = blockDim.x / kWarpSize;
  const Scan<T> scan = ScanWarp(value, combine);
  if (lane == kWarpSize - 1) through_warp[warp] = scan.through;
  __syncthreads();
  if (warp == 0) {
    const T of_warps = ScanWarp(lane < num_warps ? through_warp[lane] : T{}, combine).through;
    __syncwarp();
    through_warp[lane] = of_warps;
  }
  __syncthreads();
  const T before_warp = warp == 0 ? T{} : through_warp[warp - 1];
  const T total = through_warp[num_warps - 1];
  __syncthreads();  // The next scan writes the same memory.
  return {combine(before_warp, scan.before), combine(before_warp, scan.through), total};
}

// The largest value of a warp, in every lane.
__device__ inline uint32_t MaxOfWarp(uint32_t value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_CUDA_BLOCK_SCAN_CUH_
