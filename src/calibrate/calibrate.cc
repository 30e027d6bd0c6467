#include "calibrate/calibrate.h"

#include <algorithm>
#include <optional>

#include "calibrate/sensitivity.h"
#include "calibrate/sparse_quantiles.h"
#include "core/error.h"
#include "core/progress.h"
#include "model/block.h"

namespace lacuna::calibrate {
namespace {

using model::Criterion;
using model::kInputs;
using model::Mode;
using model::PerInput;

/// Shares by level and layer of the search inside each block, whose inputs are the dense model's.
std::vector<std::vector<Shares>> search_all(const model::Config& config, BlockWalk& walk, std::span<const int32_t> ids,
                                            const Statistics& statistics, const ColumnNorms& norms,
                                            const CalibrateOptions& options) {
  SearchOptions search = options.search;
  search.group = options.group;
  walk.begin(ids.first(size_t(options.search_windows * options.search_window)));
  std::vector<std::vector<Shares>> out(options.criteria.size(),
                                       std::vector<Shares>(options.levels.size(), Shares(size_t(config.n_layers))));
  std::optional<Progress> progress;
  if (options.progress) progress.emplace("Search", config.n_layers * int64_t(options.criteria.size()), "blocks");
  for (int64_t layer = 0; layer < config.n_layers; ++layer) {
    BlockTrials& block = walk.next();
    for (size_t c = 0; c < options.criteria.size(); ++c) {
      const bool wina = options.criteria[c] == Criterion::wina;
      const auto path = search_block(block, statistics.of(options.criteria[c])[size_t(layer)],
                                     wina ? &norms[size_t(layer)] : nullptr, options.levels.back(), search);
      for (size_t i = 0; i < options.levels.size(); ++i)
        out[c][i][size_t(layer)] = point_at(path, options.levels[i]).share;
      if (progress) progress->add(1);
    }
  }
  return out;
}

PerInput quantiles(const Shares& shares, const std::vector<std::array<Histogram, kInputs>>& sizes) {
  PerInput t(shares.size());
  for (size_t l = 0; l < shares.size(); ++l)
    for (size_t i = 0; i < size_t(kInputs); ++i) t[l][i] = sizes[l][i].quantile(shares[l][i]);
  return t;
}

PerInput below(const PerInput& t, const std::vector<std::array<Histogram, kInputs>>& sizes) {
  PerInput out(t.size());
  for (size_t l = 0; l < t.size(); ++l)
    for (size_t i = 0; i < size_t(kInputs); ++i) out[l][i] = float(sizes[l][i].share_below(t[l][i]));
  return out;
}

bool asked(const CalibrateOptions& options, Mode mode) {
  return std::find(options.modes.begin(), options.modes.end(), mode) != options.modes.end();
}

void check(const CalibrateOptions& options, const model::Config& config, int64_t available) {
  if (options.modes.empty() || options.criteria.empty() || options.levels.empty())
    throw Error("calibration needs at least one mode, one criterion and one level");
  for (size_t i = 0; i < options.levels.size(); ++i)
    if (!(options.levels[i] > 0 && options.levels[i] < 1) || (i > 0 && options.levels[i] <= options.levels[i - 1]))
      throw Error("levels of activation sparsity must ascend between 0 and 1, got {}", options.levels[i]);
  const int64_t longest =
      std::max(asked(options, Mode::uniform) && options.modes.size() == 1 ? 0 : options.search_window,
               asked(options, Mode::layered) ? options.sensitivity_tokens : 0);
  if (longest > config.n_ctx)
    throw Error("the search for thresholds with windows of {} tokens; this model takes 1 to {}", longest, config.n_ctx);
  if (options.ctx < 1 || options.ctx > config.n_ctx)
    throw Error("calibration with windows of {} tokens; this model takes 1 to {}", options.ctx, config.n_ctx);
  if (options.ctx <= options.skipped)
    throw Error("calibration with windows of {} tokens, of which the first {} are left out: nothing is left",
                options.ctx, options.skipped);
  const int64_t searched = options.search_windows * options.search_window;
  int64_t needed = options.skipped + 1;
  if (asked(options, Mode::greedy)) needed = std::max(needed, searched);
  if (asked(options, Mode::layered)) needed = std::max(needed, searched + options.sensitivity_tokens);
  if (available < needed)
    throw Error("calibration needs {} tokens, the text has {}; take a longer text or fewer tokens", needed, available);
  const int64_t sparse = std::min(options.sparse_tokens, available);
  if (options.sparse_tokens > 0 && sparse <= options.skipped)
    throw Error(
        "the sparse model's quantiles need more tokens than the {} that each window leaves out, got {}; give more "
        "sparse "
        "tokens, or 0 for the dense model's quantiles",
        options.skipped, sparse);
}

}  // namespace

Calibration calibrate(Subject& subject, const io::Checkpoint& checkpoint, std::span<const int32_t> ids,
                      const std::string& text_sha256, const CalibrateOptions& options) {
  const model::Config& config = subject.config();
  check(options, config, int64_t(ids.size()));
  subject.check_group(options.group);
  std::unique_ptr<BlockWalk> walk;  // whether its memory is there, before minutes of work
  if (asked(options, Mode::greedy))
    walk = subject.walk(options.search_windows, options.search_window, options.search.dense_prefix);
  Calibration out;
  model::ThresholdSet& set = out.set;
  if (std::find(options.criteria.begin(), options.criteria.end(), Criterion::wina) != options.criteria.end()) {
    set.norms.resize(size_t(config.n_layers));
    for (int64_t layer = 0; layer < config.n_layers; ++layer)
      for (int64_t i = 0; i < kInputs; ++i)
        set.norms[size_t(layer)][size_t(i)] =
            model::column_norms(checkpoint, config, layer, model::Input(i), subject.pool());
  }
  out.statistics = collect_statistics(
      subject, ids.first(std::min(ids.size(), size_t(options.tokens))), set.norms,
      {.ctx = options.ctx, .skipped = options.skipped, .progress = options.progress, .group = options.group});

  set.widths = input_widths(config);
  set.n_layers = config.n_layers;
  set.levels = options.levels;
  set.text_sha256 = text_sha256;
  set.tokens = out.statistics.tokens;
  set.ctx = options.ctx;
  set.skipped = options.skipped;
  set.group = options.group;
  const auto add = [&](Mode mode, Criterion criterion, const std::vector<Shares>& shares) {
    model::ThresholdSet::Entry& entry = set.entries.emplace_back();
    entry.mode = mode;
    entry.criterion = criterion;
    for (size_t level = 0; level < shares.size(); ++level) {
      model::Thresholds thresholds;
      thresholds.criterion = criterion;
      thresholds.group = options.group;
      if (criterion == Criterion::wina) thresholds.norms = set.norms;
      if (options.sparse_tokens > 0) {
        take_sparse_quantiles(
            subject, ids.first(std::min(ids.size(), size_t(options.sparse_tokens))), shares[level],
            {options.ctx, options.skipped, options.progress,
             fmt::format("{} {} {:.0f}%", name_of(mode), name_of(criterion), 100 * set.levels[level])},
            thresholds);
      } else {
        thresholds.t = quantiles(shares[level], out.statistics.of(criterion));
        thresholds.realised = below(thresholds.t, out.statistics.of(criterion));
      }
      entry.t.push_back(std::move(thresholds.t));
      entry.realised.push_back(std::move(thresholds.realised));
    }
  };
  if (asked(options, Mode::uniform)) {
    for (const Criterion criterion : options.criteria) {
      std::vector<Shares> shares;
      for (const double level : options.levels) {
        std::array<double, kInputs> same;
        same.fill(level);
        shares.push_back(Shares(size_t(config.n_layers), same));
      }
      add(Mode::uniform, criterion, shares);
    }
  }
  if (asked(options, Mode::greedy)) {
    const auto shares = search_all(config, *walk, ids, out.statistics, set.norms, options);
    for (size_t c = 0; c < options.criteria.size(); ++c) add(Mode::greedy, options.criteria[c], shares[c]);
  }
  if (asked(options, Mode::layered)) {
    const auto part =
        ids.subspan(size_t(options.search_windows * options.search_window), size_t(options.sensitivity_tokens));
    subject.set_sparsity(std::nullopt);
    for (const Criterion criterion : options.criteria) {
      constexpr double kMeasuredAt = 0.65;  // large enough to stand out of the rounding of activations
      std::array<double, kInputs> same;
      same.fill(kMeasuredAt);
      model::Thresholds at;
      at.criterion = criterion;
      at.group = options.group;
      at.t = quantiles(Shares(size_t(config.n_layers), same), out.statistics.of(criterion));
      if (criterion == Criterion::wina) at.norms = set.norms;
      const auto divergence = measure_sensitivity(subject, part, at, options.skipped, options.progress);
      std::vector<Shares> shares;
      for (const double level : options.levels)
        shares.push_back(allocate(divergence, at.t, out.statistics.of(criterion), subject.bytes(), level));
      add(Mode::layered, criterion, shares);
    }
  }
  subject.set_sparsity(std::nullopt);
  return out;
}

}  // namespace lacuna::calibrate
