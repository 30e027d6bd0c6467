// src/kernels/reference/linear.cc - the linear op in double precision, one row of W at a time.
#include "kernels/linear.h"

#include <vector>

namespace lacuna::kernels {

void reference_linear(const WeightView& w, const Activation& x, const Output& y) {
  const auto [N, K] = w.shape;
  std::vector<float> row(static_cast<size_t>(K));
  for (int64_t n = 0; n < N; ++n) {
    layout::decode_rows(*w.layout, w.shape, w.bytes, n, 1, row.data());
    for (int64_t m = 0; m < x.M; ++m) {
      double sum = w.bias.empty() ? 0.0 : double(w.bias[size_t(n)]);
      for (int64_t k = 0; k < K; ++k) sum += double(row[size_t(k)]) * double(x.x[m * x.stride + k]);
      y.y[m * y.stride + n] = float(sum);
    }
  }
}

}  // namespace lacuna::kernels
