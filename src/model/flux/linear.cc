#include "model/flux/linear.h"

#include <algorithm>
#include <cassert>

namespace lacuna::model::flux {

Linear::Linear(std::span<const kernels::WeightView> parts, ThreadPool& pool)
    : group_(kernels::make_cpu_linear_group(parts, pool)), K_(parts.front().shape.K) {
  for (const kernels::WeightView& part : parts) {
    N_ += part.shape.N;
    if (std::find(names_.begin(), names_.end(), part.name) == names_.end()) names_.push_back(part.name);
  }
}

void Linear::run(const float* x, int64_t M, int64_t stride, std::span<const kernels::Output> y,
                 const InputObserver* observer) {
  if (observer != nullptr) (*observer)({names_, x, M, K_, stride});
  kernels::Activation input;
  input.x = x;
  input.M = M;
  input.stride = stride;
  group_->run(input, y);
}

void Linear::run(const float* x, int64_t M, float* y, const InputObserver* observer) {
  const kernels::Output output{y, N_};
  run(x, M, K_, std::span(&output, 1), observer);
}

GroupedLinear::GroupedLinear(std::span<const kernels::WeightView> experts, ThreadPool& pool) {
  for (const kernels::WeightView& expert : experts) experts_.emplace_back(std::span(&expert, 1), pool);
}

void GroupedLinear::run(const float* x, std::span<const int64_t> offsets, float* y, const InputObserver* observer) {
  assert(offsets.size() == experts_.size() + 1);
  for (size_t e = 0; e < experts_.size(); ++e) {
    const int64_t first = offsets[e], rows = offsets[e + 1] - first;
    if (rows > 0) experts_[e].run(x + first * experts_[e].K(), rows, y + first * experts_[e].N(), observer);
  }
}

}  // namespace lacuna::model::flux
