// Splits a loop over the cores that the process was given.

#ifndef HOP_TF_OPS_KERNELS_PARALLEL_H_
#define HOP_TF_OPS_KERNELS_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace hop_tf {

// How many threads to use where the caller leaves it open. Read once.
int NumCores();

// Into how many parts `ParallelFor` splits `num_items`; at least 1.
int NumParts(int64_t num_items, int64_t min_items_per_part, int num_threads);

// Calls body(part, begin, end) for parts that make up [0, num_items), each on a thread of its own, and waits for them.
// Every `begin` is a multiple of `granularity`.
//
// Threads are started for each call: that costs some 20 microseconds, which the size of a part makes small, and leaves
// no pool that a fork would break or an exit would have to wait for. Where no thread can be started, the caller's
// thread does the work.
void ParallelFor(int64_t num_items, int num_parts, int64_t granularity,
                 const std::function<void(int part, int64_t begin, int64_t end)>& body);

}  // namespace hop_tf

#endif  // HOP_TF_OPS_KERNELS_PARALLEL_H_
