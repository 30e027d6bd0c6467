#include "calibrate/statistics.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/progress.h"
#include "kernels/active.h"

namespace lacuna::calibrate {

void add_sizes(const float* x, int64_t M, int64_t K, const float* norms, int64_t group, Histogram& sizes) {
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t k = 0; k < K; k += group) {
      if (group > 1) {
        sizes.add(kernels::group_size(x + m * K + k, norms ? norms + k : nullptr, std::min(group, K - k)));
        continue;
      }
      const float size = std::abs(x[m * K + k]);
      sizes.add(norms ? size * norms[k] : size);
    }
  }
}

void run_observed(model::Decoder& decoder, std::span<const int32_t> ids, const StatisticsOptions& options,
                  const model::Decoder::Observer& observe) {
  std::optional<Progress> progress;
  if (options.progress) progress.emplace(options.label, int64_t(ids.size()), "tokens");
  struct Observing {  // the observer goes whatever happens
    model::Decoder& decoder;
    ~Observing() { decoder.set_observer({}); }
  };
  const Observing guard{decoder};
  decoder.set_observer([&](int64_t layer, model::Input input, const float* x, int64_t M, int64_t K, int64_t position) {
    const int64_t skipped = std::clamp<int64_t>(options.skipped - position, 0, M);
    for (int64_t i = skipped * K; i < M * K; ++i)
      if (!std::isfinite(x[i]))
        throw Error("layer {}, {}: value {} of the token at position {} is {}; thresholds need finite activations",
                    layer, name_of(input), i % K, position + i / K, x[i]);
    observe(layer, input, x + skipped * K, M - skipped, K, position + skipped);
  });
  model::Session session(decoder, std::min<int64_t>(options.ctx, std::max<int64_t>(1, int64_t(ids.size()))));
  for (size_t first = 0; first < ids.size(); first += size_t(options.ctx)) {
    session.truncate(0);
    const auto window = ids.subspan(first, std::min(size_t(options.ctx), ids.size() - first));
    for (size_t at = 0; at < window.size(); at += 512) {
      const auto batch = window.subspan(at, std::min<size_t>(512, window.size() - at));
      decoder.forward(session, batch, model::Decoder::Want::layers, {});
      if (progress) progress->add(int64_t(batch.size()));
    }
  }
}

Statistics collect_statistics(model::Decoder& decoder, std::span<const int32_t> ids, const ColumnNorms& norms,
                              const StatisticsOptions& options) {
  const auto n_layers = size_t(decoder.config().n_layers);
  Statistics out;
  out.magnitude.resize(n_layers);
  if (!norms.empty()) out.wina.resize(n_layers);
  decoder.set_sparsity(std::nullopt);
  run_observed(decoder, ids, options,
               [&](int64_t layer, model::Input input, const float* x, int64_t M, int64_t K, int64_t) {
                 const auto l = size_t(layer), i = size_t(input);
                 if (layer == 0 && input == model::Input::attn_in) out.tokens += M;
                 // One job a criterion: each has tables of its own.
                 decoder.pool().parallel_for(norms.empty() ? 1 : 2, 1, [&](int64_t begin, int64_t end) {
                   for (int64_t criterion = begin; criterion < end; ++criterion)
                     criterion == 0 ? add_sizes(x, M, K, nullptr, options.group, out.magnitude[l][i])
                                    : add_sizes(x, M, K, norms[l][i].data(), options.group, out.wina[l][i]);
                 });
               });
  return out;
}

}  // namespace lacuna::calibrate
