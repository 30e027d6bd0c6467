// src/kernels/reference/linear.cc - the linear op in double precision.
#include "kernels/linear.h"

#include <algorithm>
#include <vector>

namespace lacuna::kernels {

void reference_linear(const WeightView& w, const Activation& x, const Output& y) {
  constexpr int64_t kRows = 256;  // decoded at once: a superblock of a zigzag layout
  const auto [N, K] = w.shape;
  std::vector<float> rows(static_cast<size_t>(std::min(kRows, N) * K));
  for (int64_t n = 0; n < N; ++n) {
    if (n % kRows == 0)
      layout::decode_rows(*w.layout, w.shape, w.bytes, n, std::min(kRows, N - n), rows.data(), w.params);
    const float* row = rows.data() + n % kRows * K;
    for (int64_t m = 0; m < x.M; ++m) {
      const float* input = x.x + m * x.stride;
      double sum = w.bias.empty() ? 0.0 : double(w.bias[size_t(n)]);
      const int64_t count = x.all() ? K : x.active_count;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t k = x.all() ? i : x.active[i];
        sum += double(row[k]) * double(input[k]);
      }
      y.y[m * y.stride + n] = float(sum);
    }
  }
}

}  // namespace lacuna::kernels
