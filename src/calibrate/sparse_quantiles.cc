#include "calibrate/sparse_quantiles.h"

#include <utility>

namespace lacuna::calibrate {

using model::kInputs;

namespace {

struct DenseAtTheEnd {  // whatever happens
  model::Decoder& decoder;
  ~DenseAtTheEnd() { decoder.set_sparsity(std::nullopt); }
};

}  // namespace

void take_sparse_quantiles(model::Decoder& decoder, std::span<const int32_t> ids, const Shares& shares,
                           const StatisticsOptions& options, model::Thresholds& thresholds) {
  const size_t n_layers = shares.size();
  thresholds.t.assign(n_layers, {});
  thresholds.realised.assign(n_layers, {});
  std::vector<std::array<Histogram, kInputs>> sizes(n_layers);
  decoder.set_sparsity(model::SparsityOptions{thresholds, options.skipped, true});
  const DenseAtTheEnd guard{decoder};
  run_observed(decoder, ids, options,
               [&](int64_t layer, model::Input input, const float* x, int64_t M, int64_t K, int64_t) {
                 const auto l = size_t(layer), i = size_t(input);
                 const float* norms = thresholds.norms.empty() ? nullptr : thresholds.norms[l][i].data();
                 add_sizes(x, M, K, norms, thresholds.group, sizes[l][i]);
                 decoder.set_threshold(layer, input, sizes[l][i].quantile(shares[l][i]));
               });
  for (size_t l = 0; l < n_layers; ++l)
    for (size_t i = 0; i < size_t(kInputs); ++i) {
      thresholds.t[l][i] = sizes[l][i].quantile(shares[l][i]);
      thresholds.realised[l][i] = float(sizes[l][i].share_below(thresholds.t[l][i]));
    }
}

model::PerInput realised_shares(model::Decoder& decoder, std::span<const int32_t> ids,
                                const model::Thresholds& thresholds, const StatisticsOptions& options) {
  decoder.set_sparsity(model::SparsityOptions{thresholds, options.skipped, true});
  const DenseAtTheEnd guard{decoder};
  run_observed(decoder, ids, options, [](int64_t, model::Input, const float*, int64_t, int64_t, int64_t) {});
  const model::SparsityCounts& counts = decoder.sparsity_counts();
  model::PerInput out(counts.layers.size());
  for (size_t l = 0; l < out.size(); ++l)
    for (size_t i = 0; i < size_t(kInputs); ++i) out[l][i] = float(counts.layers[l][i].share());
  return out;
}

}  // namespace lacuna::calibrate
