// src/solver/columns.cu - columns.h on a GPU: a thread a row of weights.
#include <fmt/format.h>

#include "core/error.h"
#include "solver/columns_raw.h"

namespace lacuna::solver::detail {
namespace {

constexpr int kThreads = 32;

__global__ void fix(RawColumns c) {
  extern __shared__ float left[];  // [fixed columns, kThreads]: a thread reads what it wrote
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= c.N) return;
  float* own = left + threadIdx.x;
  const bool rounds = c.scale != nullptr;
  const float scale = rounds ? c.scale[n] : 1, zero = rounds ? c.zero[n] : 0, step = rounds ? c.step[n] : 1;
  const int first = int(c.first), last = int(c.last), end = int(c.end);
  // Column j less what columns [first, k) left over for it.
  const auto up_to_date = [&](int j, int k) {
    float sums[4] = {c.values[j * c.N + n], 0, 0, 0};
    const float* factor = c.factor + first * c.factor_step + j;
    int p = 0;
    for (; p + 4 <= k - first; p += 4)
      for (int i = 0; i < 4; ++i) sums[i] -= factor[(p + i) * c.factor_step] * own[(p + i) * kThreads];
    for (; p < k - first; ++p) sums[0] -= factor[p * c.factor_step] * own[p * kThreads];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  for (int k = first; k < last; ++k) {
    const int64_t at = k * c.N + n;
    const float value = up_to_date(k, k), before = c.inverse != nullptr ? c.stored[at] : 0;
    const float wanted = c.inverse != nullptr ? before + value * c.inverse[k] : value;
    float stored = wanted;
    if (rounds) {
      const float nearest = rintf(wanted / step) + zero;
      const float code = nearest < 0 ? 0 : nearest > c.most ? c.most : nearest;  // a NaN stays one
      c.code[at] = code;
      stored = (code - zero) * scale;
    }
    if (c.keep != nullptr && !c.keep[at]) stored = 0;
    const float difference = c.inverse != nullptr ? stored - before : wanted - stored;
    own[(k - first) * kThreads] = difference;
    c.left[at] = difference;
    c.stored[at] = stored;
  }
  for (int j = last; j < end; ++j) c.values[j * c.N + n] = up_to_date(j, last);
}

}  // namespace

void fix_columns_cuda(const RawColumns& columns) {
  int before = columns.device;
  if (columns.last - columns.first > kMostBlockColumns)
    throw Error("{} columns at once; the GPU fixes {} at most", columns.last - columns.first, kMostBlockColumns);
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) error = cudaSetDevice(columns.device);
  if (error != cudaSuccess) throw Error("GPU {}: {}", columns.device, cudaGetErrorString(error));
  static_assert(kMostBlockColumns * kThreads * sizeof(float) <= 48 * 1024);
  const auto blocks = unsigned((columns.N + kThreads - 1) / kThreads);
  const auto bytes = size_t(columns.last - columns.first) * kThreads * sizeof(float);
  fix<<<blocks, kThreads, bytes>>>(columns);
  error = cudaGetLastError();
  cudaSetDevice(before);
  if (error != cudaSuccess)
    throw Error("a sweep over {} columns of {} rows on the GPU: {}", columns.end, columns.N, cudaGetErrorString(error));
}

}  // namespace lacuna::solver::detail
