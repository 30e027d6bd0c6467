#include "calibrate/sparse_quantiles.h"

#include <utility>

namespace lacuna::calibrate {

using model::kInputs;

void take_sparse_quantiles(model::Decoder& decoder, std::span<const int32_t> ids, const Shares& shares,
                           const StatisticsOptions& options, model::Thresholds& thresholds) {
  const size_t n_layers = shares.size();
  thresholds.t.assign(n_layers, {});
  thresholds.realised.assign(n_layers, {});
  std::vector<std::array<Histogram, kInputs>> sizes(n_layers);
  decoder.set_sparsity(model::SparsityOptions{thresholds, options.skipped, true});
  struct Dense {  // whatever happens
    model::Decoder& decoder;
    ~Dense() { decoder.set_sparsity(std::nullopt); }
  };
  const Dense guard{decoder};
  run_observed(decoder, ids, options,
               [&](int64_t layer, model::Input input, const float* x, int64_t M, int64_t K, int64_t) {
                 const auto l = size_t(layer), i = size_t(input);
                 const float* norms = thresholds.norms.empty() ? nullptr : thresholds.norms[l][i].data();
                 add_sizes(x, M, K, norms, sizes[l][i]);
                 decoder.set_threshold(layer, input, sizes[l][i].quantile(shares[l][i]));
               });
  for (size_t l = 0; l < n_layers; ++l)
    for (size_t i = 0; i < size_t(kInputs); ++i) {
      thresholds.t[l][i] = sizes[l][i].quantile(shares[l][i]);
      thresholds.realised[l][i] = float(sizes[l][i].share_below(thresholds.t[l][i]));
    }
}

}  // namespace lacuna::calibrate
