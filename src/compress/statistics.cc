#include "compress/statistics.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace lacuna::compress {
namespace {

/// Adds x^T x to sum, in blocks of rows from the diagonal to the right: the rest follows from symmetry.
void add_half_of_moment(const at::Tensor& x, at::Tensor& sum) {
  const int64_t block = x.is_cpu() ? 128 : 1024;  // few large products fill a GPU
  const int64_t K = x.size(1);
  for (int64_t first = 0; first < K; first += block) {
    const int64_t rows = std::min(block, K - first);
    const at::Tensor right = x.narrow(1, first, K - first);
    sum.narrow(0, first, rows).narrow(1, first, K - first).add_(at::mm(x.narrow(1, first, rows).t(), right));
  }
}

}  // namespace

void StatisticsSums::add(model::Input input, const at::Tensor& inputs) {
  constexpr double kFar = 10;
  Sum& sum = sums_[size_t(input)];
  if (!sum.moment.defined()) {
    const int64_t K = inputs.size(1);
    sum.moment = at::zeros({K, K}, inputs.options().dtype(at::kDouble));
    sum.abs = at::zeros({K}, inputs.options().dtype(at::kDouble));
  }
  const at::Tensor squares = inputs.to(at::kDouble).square().sum(1, true), median = squares.median();
  sum.squares += squares.sum().item<double>();
  sum.outliers += squares.masked_select(squares > kFar * median).sum().item<double>();
  at::Tensor x = inputs;
  if (weights_.clip > 0 && median.item<double>() > 0) {
    const at::Tensor most = weights_.clip * median;
    const at::Tensor factor = at::where(squares > most, (most / squares).sqrt(), at::ones_like(squares));
    x = inputs * factor.to(at::kFloat);
  }
  const at::Tensor size = x.abs();
  sum.abs.add_(size.sum(0, false, at::kDouble)).add_(size[0].to(at::kDouble), weights_.first - 1);
  if (weights_.first != 1) {
    x = x.clone();
    x[0].mul_(std::sqrt(weights_.first));
  }
  add_half_of_moment(x, sum.moment);
  sum.tokens += x.size(0);
  sum.weight += double(x.size(0) - 1) + weights_.first;
}

double StatisticsSums::outlier_share(model::Input input) const {
  const Sum& sum = sums_[size_t(input)];
  return sum.squares > 0 ? sum.outliers / sum.squares : 0;
}

std::array<solver::Statistics, model::kInputs> StatisticsSums::finish(int64_t layer) {
  std::array<solver::Statistics, model::kInputs> out;
  for (size_t i = 0; i < out.size(); ++i) {
    Sum& sum = sums_[i];
    if (!at::isfinite(sum.moment).all().item<bool>())
      throw Error("layer {}: the second moment of {} is not finite; its calibration inputs are too large for float32",
                  layer, model::name_of(model::Input(i)));
    const at::Tensor upper = (sum.moment / sum.weight).to(at::kFloat).triu();
    out[i] = {upper + upper.triu(1).t(), (sum.abs / sum.weight).to(at::kFloat), sum.tokens};
    sum.moment.reset();
  }
  return out;
}

}  // namespace lacuna::compress
