// Products of a matrix with a few vectors, in an order of operations that is the same on all processors.

#include <cmath>
#include <cstdint>

#include "checks.h"
#include "hop_tf_kernels.h"

namespace hop_tf {
namespace {

// Sums of a dot product, so that vector instructions of any width add up in the same order.
constexpr int kLanes = 16;

template <typename Sum>
Sum Dot(const float* left, const float* right, int64_t size) {
  Sum lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += static_cast<Sum>(left[i + lane]) * right[i + lane];
  }
  for (int lane = 0; i < size; ++i, ++lane) lanes[lane] += static_cast<Sum>(left[i]) * right[i];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

void Add(float factor, const float* from, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] += factor * from[i];
}

// A vector of which only this share is left is rounding.
constexpr double kLeastShare = 1e-6;

// Makes a vector orthogonal to earlier ones and of length 1. Returns false if only rounding is left of it.
bool Reduce(const float* earlier, int64_t num_earlier, int64_t size, float* vector) {
  const double before = std::sqrt(Dot<double>(vector, vector, size));
  for (int64_t other = 0; other < num_earlier; ++other) {
    const float* unit = earlier + other * size;
    Add(static_cast<float>(-Dot<double>(unit, vector, size)), unit, size, vector);
  }
  const double after = std::sqrt(Dot<double>(vector, vector, size));
  if (after <= kLeastShare * before) return false;
  for (int64_t i = 0; i < size; ++i) vector[i] = static_cast<float>(vector[i] / after);
  return true;
}

// The second time removes what rounding has left of earlier vectors.
bool ReduceTwice(const float* earlier, int64_t num_earlier, int64_t size, float* vector) {
  return Reduce(earlier, num_earlier, size, vector) && Reduce(earlier, num_earlier, size, vector);
}

void MakeOrthonormal(const float* earlier, int64_t num_earlier, int64_t size, float* vector) {
  if (ReduceTwice(earlier, num_earlier, size, vector)) return;
  for (int64_t axis = 0; axis < size; ++axis) {
    for (int64_t i = 0; i < size; ++i) vector[i] = i == axis;
    if (ReduceTwice(earlier, num_earlier, size, vector)) return;
  }
  for (int64_t i = 0; i < size; ++i) vector[i] = 0;
}

bool AreValid(int64_t rows, int64_t columns, int64_t rank) {
  constexpr int64_t kMost = int64_t{1} << 31;
  return rows >= 0 && rows < kMost && columns >= 0 && columns < kMost && rank >= 1 && rank < kMost;
}

}  // namespace
}  // namespace hop_tf

HopTfStatus HopTfTimesVectors(const float* matrix, int64_t rows, int64_t columns, const float* vectors, int64_t rank,
                              float* products) {
  if (!hop_tf::AreValid(rows, columns, rank)) return HOP_TF_INVALID_ARGUMENT;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t each = 0; each < rank; ++each) {
      products[each * rows + row] = hop_tf::Dot<float>(matrix + row * columns, vectors + each * columns, columns);
    }
  }
  return HOP_TF_OK;
}

HopTfStatus HopTfVectorsTimes(const float* vectors, int64_t rank, const float* matrix, int64_t rows, int64_t columns,
                              float* products) {
  if (!hop_tf::AreValid(rows, columns, rank)) return HOP_TF_INVALID_ARGUMENT;
  for (int64_t i = 0; i < rank * columns; ++i) products[i] = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t each = 0; each < rank; ++each) {
      hop_tf::Add(vectors[each * rows + row], matrix + row * columns, columns, products + each * columns);
    }
  }
  return HOP_TF_OK;
}

HopTfStatus HopTfAddProduct(double scale, const float* left, const float* right, int64_t rank, int64_t rows,
                            int64_t columns, float* matrix) {
  if (!hop_tf::AreValid(rows, columns, rank)) return HOP_TF_INVALID_ARGUMENT;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t each = 0; each < rank; ++each) {
      hop_tf::Add(static_cast<float>(scale) * left[each * rows + row], right + each * columns, columns, matrix + row * columns);
    }
  }
  return HOP_TF_OK;
}

HopTfStatus HopTfOrthonormalize(float* vectors, int64_t rank, int64_t size) {
  if (!hop_tf::AreValid(size, 0, rank)) return HOP_TF_INVALID_ARGUMENT;
  for (int64_t each = 0; each < rank; ++each) {
    hop_tf::MakeOrthonormal(vectors, each, size, vectors + each * size);
  }
  return HOP_TF_OK;
}
