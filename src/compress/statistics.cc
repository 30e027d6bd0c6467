#include "compress/statistics.h"

#include <algorithm>

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

void StatisticsSums::add(model::Input input, const at::Tensor& x) {
  Sum& sum = sums_[size_t(input)];
  if (sum.tokens == 0) {
    sum.moment = at::zeros({x.size(1), x.size(1)}, x.options().dtype(at::kDouble));
    sum.abs = at::zeros({x.size(1)}, x.options().dtype(at::kDouble));
  }
  add_half_of_moment(x, sum.moment);
  sum.abs.add_(x.abs().sum(0, false, at::kDouble));
  sum.tokens += x.size(0);
}

std::array<solver::Statistics, model::kInputs> StatisticsSums::finish(int64_t layer) const {
  std::array<solver::Statistics, model::kInputs> out;
  for (size_t i = 0; i < out.size(); ++i) {
    const Sum& sum = sums_[i];
    if (!at::isfinite(sum.moment).all().item<bool>())
      throw Error("layer {}: the second moment of {} is not finite; its calibration inputs are too large for float32",
                  layer, model::name_of(model::Input(i)));
    const at::Tensor upper = (sum.moment / double(sum.tokens)).to(at::kFloat).triu();
    out[i] = {upper + upper.triu(1).t(), (sum.abs / double(sum.tokens)).to(at::kFloat), sum.tokens};
  }
  return out;
}

}  // namespace lacuna::compress
