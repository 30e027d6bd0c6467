#include "calibrate/sparse_quantiles.h"

#include <utility>

namespace lacuna::calibrate {

using model::kInputs;

namespace {

struct DenseAtTheEnd {  // whatever happens
  Subject& subject;
  ~DenseAtTheEnd() { subject.set_sparsity(std::nullopt); }
};

}  // namespace

void take_sparse_quantiles(Subject& subject, std::span<const int32_t> ids, const Shares& shares,
                           const StatisticsOptions& options, model::Thresholds& thresholds) {
  const size_t n_layers = shares.size();
  thresholds.t.assign(n_layers, {});
  thresholds.realised.assign(n_layers, {});
  std::vector<std::array<Histogram, kInputs>> sizes(n_layers);
  subject.set_sparsity(model::SparsityOptions{thresholds, options.skipped, true});
  const DenseAtTheEnd guard{subject};
  run_observed(subject, ids, options, [&](int64_t layer, model::Input input, const SeenInputs& inputs) {
    const auto l = size_t(layer), i = size_t(input);
    const SeenInputs::Sizes to = {thresholds.norms.empty() ? nullptr : thresholds.norms[l][i].data(), &sizes[l][i]};
    inputs.add_sizes({&to, 1}, thresholds.group);
    subject.set_threshold(layer, input, sizes[l][i].quantile(shares[l][i]));
  });
  for (size_t l = 0; l < n_layers; ++l)
    for (size_t i = 0; i < size_t(kInputs); ++i) {
      thresholds.t[l][i] = sizes[l][i].quantile(shares[l][i]);
      thresholds.realised[l][i] = float(sizes[l][i].share_below(thresholds.t[l][i]));
    }
}

model::PerInput realised_shares(Subject& subject, std::span<const int32_t> ids, const model::Thresholds& thresholds,
                                const StatisticsOptions& options) {
  subject.set_sparsity(model::SparsityOptions{thresholds, options.skipped, true});
  const DenseAtTheEnd guard{subject};
  run_observed(subject, ids, options, [](int64_t, model::Input, const SeenInputs&) {});
  return subject.realised();
}

}  // namespace lacuna::calibrate
