// src/kernels/cuda/column_statistics.h - what masks want to know of a matrix's inputs, gathered on the device: squares,
// ranges and histograms of each input over the tokens, and X^T X. Plain C++.
//
// No launch waits or allocates; every run gives the same bits. Each throws Error for arguments that are not as said.
#pragma once

#include <cstdint>

#include "core/scalar.h"
#include "kernels/cuda/device.h"

namespace lacuna::cuda {

/// Tokens' inputs of a linear layer.
struct ColumnInputs {
  const bf16* x = nullptr;  // [M, K], aligned to 4 bytes, rows `stride` values apart, an even number
  int64_t M = 0, K = 0, stride = 0;
};

/// What is added to, [K] each.
struct ColumnSums {
  double* squares = nullptr;
  float* least = nullptr;
  float* most = nullptr;
};
/// squares += x^2, which double precision holds exactly, least = min(least, x), most = max(most, x). NaN goes to the
/// squares alone.
void launch_column_sums(const Device& device, Stream& stream, const ColumnInputs& inputs, const ColumnSums& sums);

/// Bins of equal width between an input's least and largest value.
inline constexpr int kColumnBins = 100;
/// Counts each value in its bin, those outside of the range in the outer bins, all in the first where the range has no
/// width. least, most: [K]; counts: [K, kColumnBins], which wrap at 2^32.
void launch_column_counts(const Device& device, Stream& stream, const ColumnInputs& inputs, const float* least,
                          const float* most, uint32_t* counts);

/// sums += X^T X. sums: the upper triangle row by row, K (K + 1) / 2 values: (i, j), i <= j, at i K - i (i - 1) / 2 +
/// j - i. Products are summed in float32 over 256 tokens at most, then in double precision.
void launch_second_moment(const Device& device, Stream& stream, const ColumnInputs& inputs, double* sums);

}  // namespace lacuna::cuda
