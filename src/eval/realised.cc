#include "eval/realised.h"

#include <cmath>

#include "core/error.h"

namespace lacuna::eval {
namespace {

/// Every input of every layer counts the same tokens; those of the last layer may miss some that nobody asked for.
void check_counts(const model::SparsityCounts& counts, int64_t tokens) {
  if (counts.tokens != tokens)
    throw Error("activation sparsity: {} tokens left inputs out, expected {}; please report this", counts.tokens,
                tokens);
  for (size_t l = 0; l < counts.layers.size(); ++l) {
    for (size_t i = 0; i < size_t(model::kInputs); ++i) {
      const int64_t inputs = counts.layers[l][i].inputs, first = counts.layers[0][i].inputs;
      const bool last = l + 1 == counts.layers.size();
      if (inputs > first || (!last && inputs < first))
        throw Error(
            "activation sparsity: layer {}, {}: {} inputs were compared with their threshold, expected {}; "
            "please report this",
            l, name_of(model::Input(i)), inputs, first);
    }
  }
}

}  // namespace

Realised check_realised(const model::SparsityCounts& counts, const model::Thresholds& thresholds, int64_t tokens) {
  check_counts(counts, tokens);
  Realised out;
  out.asked = thresholds.level;
  out.share = counts.share();
  model::PerInput expected = thresholds.realised;
  for (size_t l = 0; l < expected.size(); ++l)
    for (size_t i = 0; i < size_t(model::kInputs); ++i)
      if (thresholds.t[l][i] == 0) expected[l][i] = 0;  // runs dense
  out.expected = model::skipped_share(expected, counts.bytes);
  const auto difference = [&](size_t l) { return std::abs(out.layers[l] - out.layers_expected[l]); };
  size_t beyond = 0;
  for (size_t l = 0; l < counts.layers.size(); ++l) {
    out.layers.push_back(counts.layer_share(int64_t(l)));
    out.layers_expected.push_back(model::skipped_share(expected[l], counts.bytes[l]));
    if (difference(l) >= difference(size_t(out.farthest))) out.farthest = int64_t(l);
    beyond += difference(l) > kLayerBound;
  }
  if (tokens == 0) {
    out.within = false;
    out.note = "no token lies behind the dense prefix, so nothing was left out";
    return out;
  }
  const auto far = size_t(out.farthest);
  if (difference(far) > kWrongThresholds)
    throw Error(
        "activation sparsity: layer {} leaves out {:.1f}% of its weights, {:.1f}% did on the calibration text; no "
        "difference of texts makes that much, so the thresholds are of other weights: calibrate this model",
        far, 100 * out.layers[far], 100 * out.layers_expected[far]);
  const std::string kind = "this text is of another kind than the calibration text; calibrate with one like it";
  if (std::abs(out.share - out.asked) > kWholeBound) {
    out.note = fmt::format("activation sparsity is {:.1f}% where {:.1f}% was asked for (calibration text {:.1f}%): {}",
                           100 * out.share, 100 * out.asked, 100 * out.expected, kind);
  } else if (beyond > 0) {
    out.note = fmt::format(
        "activation sparsity of {} of {} layers is more than {:.0f} points from the calibration's, "
        "layer {} farthest with {:.1f}% for {:.1f}%: {}",
        beyond, out.layers.size(), 100 * kLayerBound, far, 100 * out.layers[far], 100 * out.layers_expected[far], kind);
  }
  out.within = out.note.empty();
  return out;
}

}  // namespace lacuna::eval
