// src/kernels/cuda/calibration.h - what calibration wants of the inputs of many tokens (docs/spqt.md): how large they
// are, what stays of them under a threshold, how far a result is from another. Plain C++.
//
// All pointers are of device memory. Launches neither wait nor allocate.
#pragma once

#include <cstdint>

#include "kernels/cuda/device.h"
#include "kernels/cuda/ops.h"

namespace lacuna::cuda {

struct GateRowsArgs {
  Gate gate = Gate::swiglu;   // swiglu or relu
  const float* x = nullptr;   // [M, K], rows `stride` apart; swiglu: the gate
  const float* up = nullptr;  // as x, swiglu
  int64_t stride = 0;
  int64_t M = 0, K = 0;
  float* y = nullptr;  // [M, K]
  Preset preset = {};
};
void launch_gate_rows(const Device& device, Stream& stream, const GateRowsArgs& args);

/// A bin holds the magnitudes whose float bits agree but for the lowest kSizeShift ones.
inline constexpr int kSizeShift = 14;
inline constexpr int64_t kSizeBins = int64_t{1} << (31 - kSizeShift);

struct CountSizesArgs {
  const float* x = nullptr;      // [M, K]
  int64_t M = 0, K = 0;          // M K below 2^32, so that no count overflows
  const float* norms = nullptr;  // [K]: a size is |x| * norm; nullptr: |x|
  uint32_t* bins = nullptr;      // [kSizeBins]: += the number of sizes in each
};
/// The same counts every time.
void launch_count_sizes(const Device& device, Stream& stream, const CountSizesArgs& args);

/// *first = the least i for which x[i] is NaN or infinite, where that is less. x: [count], count below 2^32.
void launch_find_non_finite(const Device& device, Stream& stream, const float* x, int64_t count, uint32_t* first);

struct MaskRowsArgs {
  const float* x = nullptr;  // [M, K]
  int64_t M = 0, K = 0;
  float t = 0;
  const float* norms = nullptr;  // [K], or nullptr
  /// Row m is token `first` + m of windows of `window` tokens; the first `dense` tokens of a window stay as they are.
  int64_t first = 0, window = 1, dense = 0;
  float* y = nullptr;                      // [M, K], may be x
  unsigned long long* inactive = nullptr;  // += how many inputs are left out; nullptr: not counted
};
/// y = x, and +0 where |x| < t (|x| * norm < t): equality, NaN and infinity stay. t = 0: a copy.
void launch_mask_rows(const Device& device, Stream& stream, const MaskRowsArgs& args);

/// parts[p], p < kDistanceParts: their sum is sum (a[i] - b[i])^2, in double precision, added up in a fixed order.
inline constexpr int kDistanceParts = 256;
void launch_squared_distance(const Device& device, Stream& stream, const float* a, const float* b, int64_t count,
                             double* parts);

}  // namespace lacuna::cuda
