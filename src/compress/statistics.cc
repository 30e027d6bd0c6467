#include "compress/statistics.h"

#include "core/error.h"

namespace lacuna::compress {

void StatisticsSums::add(model::Input input, const at::Tensor& x) {
  Sum& sum = sums_[size_t(input)];
  const at::Tensor moment = at::matmul(x.t(), x).to(at::kDouble), abs = x.abs().sum(0, false, at::kDouble);
  if (sum.tokens == 0) {
    sum.moment = moment;
    sum.abs = abs;
  } else {
    sum.moment.add_(moment);
    sum.abs.add_(abs);
  }
  sum.tokens += x.size(0);
}

std::array<solver::Statistics, model::kInputs> StatisticsSums::finish(int64_t layer) const {
  std::array<solver::Statistics, model::kInputs> out;
  for (size_t i = 0; i < out.size(); ++i) {
    const Sum& sum = sums_[i];
    if (!at::isfinite(sum.moment).all().item<bool>())
      throw Error("layer {}: the second moment of {} is not finite; its calibration inputs are too large for float32",
                  layer, model::name_of(model::Input(i)));
    const at::Tensor mean = sum.moment / double(sum.tokens);
    // The product of a matrix with its transpose is symmetric up to rounding; solvers take it as symmetric.
    out[i] = {((mean + mean.t()) * 0.5).to(at::kFloat), (sum.abs / double(sum.tokens)).to(at::kFloat), sum.tokens};
  }
  return out;
}

}  // namespace lacuna::compress
