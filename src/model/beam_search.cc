#include "model/beam_search.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace lacuna::model {

BeamSearch::BeamSearch(BeamEngine& engine, BeamOptions options) : engine_(engine), options_(std::move(options)) {
  if (options_.max_tokens < 0) throw Error("{} tokens to generate; expected 0 or more", options_.max_tokens);
  const auto beams = size_t(engine_.beams());
  const auto tokens = size_t(std::min(options_.max_tokens, engine_.capacity() + 1));
  for (auto* list : {&live_, &next_}) {
    list->resize(beams);
    for (Beam& beam : *list) beam.ids.reserve(tokens);
  }
  extensions_.reserve(2 * beams * beams);
  parents_.reserve(beams);
  ids_.reserve(beams);
  finished_.reserve(beams + 1);
}

void BeamSearch::start(std::span<const int32_t> prompt) {
  // The last token of a text is not run, so one more fits than the cache has room for.
  limit_ = std::min(options_.max_tokens, engine_.capacity() - int64_t(prompt.size()) + 1);
  engine_.start(prompt, std::max<int64_t>(0, limit_ - 1));
  live_count_ = 1;
  live_[0].ids.clear();
  live_[0].log_probability = 0;
  finished_.clear();
  tokens_run_ = 0;
  settled_ = false;
  ended_ = limit_ == 0;
}

bool BeamSearch::step() {
  if (ended_) return false;
  collect_extensions();
  extend();
  settled_ = settled();
  std::swap(live_, next_);
  live_count_ = next_count_;
  ended_ = settled_ || int64_t(live_[0].ids.size()) == limit_;
  if (!ended_) run_beams();
  return true;
}

/// The 2 B likeliest extensions of each beam, all of them likeliest first; among equals the better beam's, then the
/// lower id. Twice as many as beams, so that enough are left when some end the text.
void BeamSearch::collect_extensions() {
  extensions_.clear();
  for (size_t b = 0; b < live_count_; ++b) {
    const BeamChoices choices = engine_.choices(int64_t(b));
    if (!std::isfinite(choices.log_sum_exp))
      throw Error("the model produced NaN or infinite logits after {} generated tokens", live_[b].ids.size());
    const double base = live_[b].log_probability - choices.log_sum_exp;
    for (const Candidate& choice : choices.likeliest)
      extensions_.push_back({base + double(choice.logit), b, choice.id});
  }
  std::sort(extensions_.begin(), extensions_.end(), [](const Extension& a, const Extension& b) {
    return std::tuple(-a.log_probability, a.parent, a.id) < std::tuple(-b.log_probability, b.parent, b.id);
  });
}

/// The best extensions become next_; those that end a text become finished.
void BeamSearch::extend() {
  const auto beams = size_t(engine_.beams());
  next_count_ = 0;
  for (size_t rank = 0; rank < extensions_.size() && next_count_ < beams; ++rank) {
    const Extension& extension = extensions_[rank];
    const Beam& parent = live_[extension.parent];
    if (options_.ends && options_.ends(extension.id)) {
      if (rank >= beams) continue;
      Hypothesis text{parent.ids, extension.log_probability, true};
      const auto after = std::upper_bound(finished_.begin(), finished_.end(), text.score(),
                                          [](double score, const Hypothesis& h) { return score > h.score(); });
      finished_.insert(after, std::move(text));
      if (finished_.size() > beams) finished_.pop_back();
      continue;
    }
    Beam& beam = next_[next_count_++];
    beam.ids.assign(parent.ids.begin(), parent.ids.end());
    beam.ids.push_back(extension.id);
    beam.log_probability = extension.log_probability;
    beam.parent = int32_t(extension.parent);
  }
}

/// Whether no beam may come before the finished texts any more.
bool BeamSearch::settled() const {
  if (next_count_ == 0) return true;
  if (int64_t(finished_.size()) < engine_.beams()) return false;
  return finished_.back().score() >= next_[0].log_probability / double(next_[0].ids.size());
}

void BeamSearch::run_beams() {
  parents_.clear();
  ids_.clear();
  for (size_t b = 0; b < live_count_; ++b) {
    parents_.push_back(live_[b].parent);
    ids_.push_back(live_[b].ids.back());
  }
  engine_.step(parents_, ids_);
  tokens_run_ += int64_t(live_count_);
}

std::vector<Hypothesis> BeamSearch::texts() const {
  std::vector<Hypothesis> out = finished_;
  if (!settled_)
    for (size_t b = 0; b < live_count_; ++b) out.push_back({live_[b].ids, live_[b].log_probability, false});
  std::stable_sort(out.begin(), out.end(),
                   [](const Hypothesis& a, const Hypothesis& b) { return a.score() > b.score(); });
  if (int64_t(out.size()) > engine_.beams()) out.resize(size_t(engine_.beams()));
  return out;
}

}  // namespace lacuna::model
