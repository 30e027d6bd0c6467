#include "calibrate/second_moment.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "kernels/linear.h"

namespace lacuna::calibrate {

namespace {

constexpr int64_t kTokens = 256;  // summed in float32
constexpr int64_t kRows = 256;    // of C, multiplied at once

/// [M, K] -> [K, M]
std::vector<float> transposed(const float* x, int64_t stride, int64_t M, int64_t K, ThreadPool& pool) {
  std::vector<float> out(size_t(M * K));
  pool.parallel_for(K, 64, [&](int64_t begin, int64_t end) {
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = begin; k < end; ++k) out[size_t(k * M + m)] = x[m * stride + k];
  });
  return out;
}

}  // namespace

SecondMoment::SecondMoment(int64_t K) : K_(K), sum_(size_t(K * (K + 1) / 2)) {}

SecondMoment::SecondMoment(int64_t K, int64_t tokens, std::vector<double> sums)
    : K_(K), tokens_(tokens), sum_(std::move(sums)) {
  assert(int64_t(sum_.size()) == K * (K + 1) / 2);
}

void SecondMoment::add(const float* x, int64_t stride, int64_t M, ThreadPool& pool) {
  std::vector<float> product;  // [kRows, K]
  for (int64_t first = 0; first < M; first += kTokens) {
    const int64_t tokens = std::min(kTokens, M - first);
    const std::vector<float> columns = transposed(x + first * stride, stride, tokens, K_, pool);
    const kernels::WeightView view{
        "inputs", &layout::get(layout::Id::f32), {K_, tokens}, std::as_bytes(std::span(columns)), {}, {}};
    const auto group = kernels::make_cpu_linear_group(std::span(&view, 1), pool);
    for (int64_t row0 = 0; row0 < K_; row0 += kRows) {
      const int64_t rows = std::min(kRows, K_ - row0);
      product.resize(size_t(rows * K_));
      kernels::Activation input;
      input.x = columns.data() + row0 * tokens;
      input.M = rows;
      input.stride = tokens;
      const kernels::Output output{product.data(), K_};
      group->run(input, std::span(&output, 1));
      pool.parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
          for (int64_t j = row0 + i; j < K_; ++j) sum_[at(row0 + i, j)] += double(product[size_t(i * K_ + j)]);
      });
    }
  }
  tokens_ += M;
}

void SecondMoment::row(int64_t i, std::span<float> out) const {
  for (int64_t j = 0; j < K_; ++j) {
    const double mean = tokens_ > 0 ? sum_[at(std::min(i, j), std::max(i, j))] / double(tokens_) : 0;
    out[size_t(j)] = float(mean);
    if (!std::isfinite(out[size_t(j)]))
      throw Error("the second moment of inputs {} and {} is {}, which float32 does not hold", i, j, mean);
  }
}

}  // namespace lacuna::calibrate
