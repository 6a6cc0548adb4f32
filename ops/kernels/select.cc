#include <cstdint>
#include <limits>

#include "checks.h"
#include "hop_tf_kernels.h"
#include "tiles.h"

using namespace hop_tf;

HopTfStatus HopTfSelectLarge(const void* values, int value_bytes, int64_t num_values, int64_t bound, int64_t first,
                             int64_t* indices, int64_t* number) {
  if (!IsSize(num_values) || bound < 1) return HOP_TF_INVALID_ARGUMENT;
  if (value_bytes == 2 && bound <= std::numeric_limits<int16_t>::max()) {
    *number = SelectLarge16(values, num_values, bound, first, indices);
  } else if (value_bytes == 4 && bound <= std::numeric_limits<int32_t>::max()) {
    *number = SelectLarge32(values, num_values, bound, first, indices);
  } else if (value_bytes == 8) {
    *number = SelectLarge64(values, num_values, bound, first, indices);
  } else {
    return HOP_TF_INVALID_ARGUMENT;
  }
  return HOP_TF_OK;
}
