#include "model/sampler.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace lacuna::model {
namespace {

void check(bool good, const char* option, double value, const char* expected) {
  if (!good) throw Error("{} = {} is out of range, expected {}", option, value, expected);
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options, int64_t n_vocab) : options_(options), rng_(options.seed) {
  check(options.temperature >= 0 && std::isfinite(options.temperature), "temperature", options.temperature,
        "0 (greedy) or more");
  check(options.top_k >= 0, "top-k", double(options.top_k), "0 (off) or more");
  check(options.top_p > 0 && options.top_p <= 1, "top-p", options.top_p, "more than 0, at most 1 (off)");
  check(options.min_p >= 0 && options.min_p <= 1, "min-p", options.min_p, "0 (off) to 1");
  check(options.repeat_penalty >= 0.01f && options.repeat_penalty <= 100, "repeat-penalty", options.repeat_penalty,
        "0.01 to 100 (1 is off)");
  check(options.repeat_window >= 0, "repeat-window", double(options.repeat_window), "0 or more");
  check(n_vocab > 0, "vocabulary size", double(n_vocab), "1 or more");
  candidates_.reserve(size_t(n_vocab));
  for (auto* ids : {&recent_, &penalized_})
    ids->reserve(size_t(std::min<int64_t>(options.repeat_window, int64_t{1} << 20)) + 1);
}

void Sampler::accept(int32_t id) {
  if (options_.repeat_window == 0) return;
  if (int64_t(recent_.size()) == options_.repeat_window) recent_.erase(recent_.begin());
  recent_.push_back(id);
}

int32_t Sampler::sample(std::span<const float> logits) {
  if (logits.empty()) throw Error("there are no logits to sample from");
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
  };
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] < HUGE_VALF))
      throw BadLogits("the model produced {} as the logit of token {}; its weights or this file are broken",
                      std::isnan(logits[i]) ? "NaN" : "infinity", i);
    candidates_.push_back({logits[i], int32_t(i)});
  }
  for (const int32_t id : penalized()) {
    if (id < 0 || size_t(id) >= candidates_.size()) continue;
    float& logit = candidates_[size_t(id)].logit;
    logit = logit > 0 ? logit / options_.repeat_penalty : logit * options_.repeat_penalty;
  }
  // Top-k: the largest first.
  const size_t k = wanted() > 0 ? std::min(size_t(wanted()), candidates_.size()) : candidates_.size();
  if (k == 1)
    std::swap(candidates_.front(), *std::min_element(candidates_.begin(), candidates_.end(), before));
  else
    std::partial_sort(candidates_.begin(), candidates_.begin() + ptrdiff_t(k), candidates_.end(), before);
  return choose(std::span(candidates_).first(k));
}

int64_t Sampler::wanted() const { return options_.temperature == 0 ? 1 : options_.top_k; }

std::span<const int32_t> Sampler::penalized() {
  penalized_.clear();
  if (options_.repeat_penalty != 1)
    for (const int32_t id : recent_)
      if (std::find(penalized_.begin(), penalized_.end(), id) == penalized_.end()) penalized_.push_back(id);
  return penalized_;
}

int32_t Sampler::choose(std::span<Candidate> candidates) {
  // Temperature; from here on `logit` holds weights relative to the best, which has 1.
  const float top = candidates.front().logit;
  if (top == -HUGE_VALF) throw BadLogits("the model gave every token the logit -infinity");
  if (options_.temperature == 0) return candidates.front().id;
  double total = 0;
  for (Candidate& c : candidates) {
    c.logit = std::exp((c.logit - top) / options_.temperature);
    total += double(c.logit);
  }
  // Top-p: the shortest head whose share reaches p. Min-p: those with at least that share of the best one's weight.
  size_t kept = candidates.size();
  if (options_.top_p < 1) {
    double share = 0;
    for (kept = 0; kept < candidates.size() && share < double(options_.top_p) * total; ++kept)
      share += double(candidates[kept].logit);
  }
  while (kept > 1 && candidates[kept - 1].logit < options_.min_p) --kept;
  double sum = 0;
  for (size_t i = 0; i < kept; ++i) sum += double(candidates[i].logit);
  double draw = rng_.uniform() * sum;
  for (size_t i = 0; i + 1 < kept; ++i) {
    draw -= double(candidates[i].logit);
    if (draw < 0) return candidates[i].id;
  }
  return candidates[kept - 1].id;
}

}  // namespace lacuna::model
