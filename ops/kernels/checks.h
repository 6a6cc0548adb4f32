// What every function of the C interface checks.

#ifndef HOP_TF_OPS_KERNELS_CHECKS_H_
#define HOP_TF_OPS_KERNELS_CHECKS_H_

#include <cstdint>
#include <new>

#include "hop_tf_kernels.h"

namespace hop_tf {

inline bool IsSize(int64_t num_values) { return num_values >= 0 && num_values <= INT32_MAX; }

inline bool IsType(HopTfType type) {
  return type == HOP_TF_FLOAT32 || type == HOP_TF_BFLOAT16 || type == HOP_TF_FLOAT16;
}

// No exception may cross the C interface. The only ones here are those of memory that could not be had.
template <typename Function>
HopTfStatus Guarded(const Function& function) {
  try {
    function();
    return HOP_TF_OK;
  } catch (const std::bad_alloc&) {
    return HOP_TF_OUT_OF_MEMORY;
  }
}

}  // namespace hop_tf

#endif  // HOP_TF_OPS_KERNELS_CHECKS_H_
