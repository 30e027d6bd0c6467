#include "calibrate/block_trials.h"

#include <algorithm>
#include <limits>

namespace lacuna::calibrate {

double squared_distance(const std::vector<float>& a, const float* b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = double(a[i]) - double(b[i]);
    sum += d * d;
  }
  return sum;
}

CpuTrials::CpuTrials(model::Block& block, const float* x, int64_t dense_prefix)
    : block_(block), x_(x), dense_prefix_(dense_prefix) {
  block_.run(x_, {}, dense_prefix_, dense_);
  scale_ = std::max(squared_distance(dense_.out, x_), std::numeric_limits<double>::min());
  restart();
}

double CpuTrials::error(model::Matrix changed, const model::Block::Masks& masks, bool keep) {
  model::Block::Pass& pass = keep ? kept_ : trial_;
  block_.rerun(x_, {&changed, 1}, masks, dense_prefix_, kept_, pass);
  return squared_distance(pass.out, dense_.out.data()) / scale_;
}

}  // namespace lacuna::calibrate
