#include "calibrate/statistics.h"

#include <algorithm>
#include <optional>

#include "core/progress.h"

namespace lacuna::calibrate {

void run_observed(Subject& subject, std::span<const int32_t> ids, const StatisticsOptions& options,
                  const InputObserver& observe) {
  std::optional<Progress> progress;
  if (options.progress) progress.emplace(options.label, int64_t(ids.size()), "tokens");
  for (size_t first = 0; first < ids.size(); first += size_t(options.ctx)) {
    const auto window = ids.subspan(first, std::min(size_t(options.ctx), ids.size() - first));
    subject.begin(int64_t(window.size()));
    for (size_t at = 0; at < window.size(); at += Subject::kBatch) {
      const auto batch = window.subspan(at, std::min<size_t>(Subject::kBatch, window.size() - at));
      subject.run(batch, options.skipped, observe);
      if (progress) progress->add(int64_t(batch.size()));
    }
  }
}

Statistics collect_statistics(Subject& subject, std::span<const int32_t> ids, const ColumnNorms& norms,
                              const StatisticsOptions& options) {
  const auto n_layers = size_t(subject.config().n_layers);
  Statistics out;
  out.magnitude.resize(n_layers);
  if (!norms.empty()) out.wina.resize(n_layers);
  subject.set_sparsity(std::nullopt);
  run_observed(subject, ids, options, [&](int64_t layer, model::Input input, const SeenInputs& inputs) {
    const auto l = size_t(layer), i = size_t(input);
    if (layer == 0 && input == model::Input::attn_in) out.tokens += inputs.tokens();
    std::array<SeenInputs::Sizes, 2> sizes = {{{nullptr, &out.magnitude[l][i]}, {}}};
    if (!norms.empty()) sizes[1] = {norms[l][i].data(), &out.wina[l][i]};
    inputs.add_sizes(std::span(sizes).first(norms.empty() ? 1 : 2), options.group);
  });
  return out;
}

}  // namespace lacuna::calibrate
