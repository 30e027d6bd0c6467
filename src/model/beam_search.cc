#include "model/beam_search.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "core/error.h"

namespace lacuna::model {

BeamSearch::BeamSearch(Decoder& decoder, int64_t capacity, kernels::KvType kv, BeamOptions options)
    : decoder_(decoder), options_(std::move(options)) {
  if (options_.beams < 1 || options_.beams > Decoder::kMostSessions)
    throw Error("{} beams; expected 1 to {}", options_.beams, Decoder::kMostSessions);
  if (options_.max_tokens < 0) throw Error("{} tokens to generate; expected 0 or more", options_.max_tokens);
  const auto beams = size_t(options_.beams);
  const auto tokens = size_t(std::min(options_.max_tokens, capacity + 1));
  slots_.reserve(beams);
  for (size_t i = 0; i < beams; ++i) {
    slots_.push_back({Session(decoder, capacity, kv), {}, false});
    slots_.back().ids.reserve(tokens);
  }
  for (auto* list : {&live_, &next_}) {
    list->resize(beams);
    for (Beam& beam : *list) beam.ids.reserve(tokens);
  }
  candidates_.reserve(2 * beams * beams);
  sessions_.reserve(beams);
  ids_.reserve(beams);
  finished_.reserve(beams + 1);
}

void BeamSearch::start(std::span<const int32_t> prompt) {
  for (Slot& slot : slots_) {
    slot.session.truncate(0);
    slot.ids.clear();
  }
  logits_ = decoder_.forward(slots_[0].session, prompt);
  // The last token of a text is not run, so one more fits than the cache has room for.
  limit_ = std::min(options_.max_tokens, slots_[0].session.capacity() - int64_t(prompt.size()) + 1);
  live_count_ = 1;
  live_[0].ids.clear();
  live_[0].log_probability = 0;
  live_[0].slot = 0;
  finished_.clear();
  tokens_run_ = 0;
  settled_ = false;
  ended_ = limit_ == 0;
}

bool BeamSearch::step() {
  if (ended_) return false;
  collect_candidates();
  extend();
  settled_ = settled();
  if (!settled_) assign_slots();
  std::swap(live_, next_);
  live_count_ = next_count_;
  ended_ = settled_ || int64_t(live_[0].ids.size()) == limit_;
  if (!ended_) run_beams();
  return true;
}

/// The 2 B likeliest extensions of each beam, all of them likeliest first; among equals the better beam's, then the
/// lower id. Twice as many as beams, so that enough are left when some end the text.
void BeamSearch::collect_candidates() {
  const int64_t V = decoder_.config().n_vocab;
  const auto wanted = size_t(std::min(2 * options_.beams, V));
  candidates_.clear();
  for (size_t b = 0; b < live_count_; ++b) {
    const float* logits = logits_.data() + int64_t(b) * V;
    const double lse = kernels::log_sum_exp(logits, V);
    if (!std::isfinite(lse))
      throw Error("the model produced NaN or infinite logits after {} generated tokens", live_[b].ids.size());
    const double base = live_[b].log_probability - lse;
    const size_t first = candidates_.size();
    for (int64_t id = 0; id < V; ++id) {
      const double value = base + double(logits[id]);
      if (candidates_.size() - first == wanted) {
        if (value <= candidates_.back().log_probability) continue;
      } else {
        candidates_.emplace_back();
      }
      size_t place = candidates_.size() - 1;
      for (; place > first && value > candidates_[place - 1].log_probability; --place)
        candidates_[place] = candidates_[place - 1];
      candidates_[place] = {value, b, int32_t(id)};
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return std::tuple(-a.log_probability, a.parent, a.id) < std::tuple(-b.log_probability, b.parent, b.id);
  });
}

/// The best candidates become next_; those that end a text become finished.
void BeamSearch::extend() {
  const auto beams = size_t(options_.beams);
  next_count_ = 0;
  for (size_t rank = 0; rank < candidates_.size() && next_count_ < beams; ++rank) {
    const Candidate& candidate = candidates_[rank];
    const Beam& parent = live_[candidate.parent];
    if (options_.ends && options_.ends(candidate.id)) {
      if (rank >= beams) continue;
      Hypothesis text{parent.ids, candidate.log_probability, true};
      const auto after = std::upper_bound(finished_.begin(), finished_.end(), text.score(),
                                          [](double score, const Hypothesis& h) { return score > h.score(); });
      finished_.insert(after, std::move(text));
      if (finished_.size() > beams) finished_.pop_back();
      continue;
    }
    Beam& beam = next_[next_count_++];
    beam.ids.assign(parent.ids.begin(), parent.ids.end());
    beam.ids.push_back(candidate.id);
    beam.log_probability = candidate.log_probability;
    beam.parent = candidate.parent;
  }
}

/// Whether no beam may come before the finished texts any more.
bool BeamSearch::settled() const {
  if (next_count_ == 0) return true;
  if (int64_t(finished_.size()) < options_.beams) return false;
  return finished_.back().score() >= next_[0].log_probability / double(next_[0].ids.size());
}

/// A beam goes on in its parent's cache; a parent's second child takes a cache that nobody goes on with, and copies
/// what differs.
void BeamSearch::assign_slots() {
  const size_t none = slots_.size();
  for (Slot& slot : slots_) slot.taken = false;
  for (size_t b = 0; b < next_count_; ++b) {
    const size_t slot = live_[next_[b].parent].slot;
    next_[b].slot = slots_[slot].taken ? none : slot;
    slots_[slot].taken = true;
  }
  for (size_t b = 0; b < next_count_; ++b) {
    if (next_[b].slot != none) continue;
    const auto free = std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.taken; });
    const Slot& parent = slots_[live_[next_[b].parent].slot];
    const int64_t prompt = parent.session.length() - int64_t(parent.ids.size());
    const auto same = std::mismatch(free->ids.begin(), free->ids.end(), parent.ids.begin(), parent.ids.end()).first;
    const int64_t kept = free->session.length() == 0 ? 0 : prompt + (same - free->ids.begin());
    free->session.copy(parent.session, kept);
    free->ids.assign(parent.ids.begin(), parent.ids.end());
    free->taken = true;
    next_[b].slot = size_t(free - slots_.begin());
  }
}

void BeamSearch::run_beams() {
  sessions_.clear();
  ids_.clear();
  for (size_t b = 0; b < live_count_; ++b) {
    Slot& slot = slots_[live_[b].slot];
    sessions_.push_back(&slot.session);
    ids_.push_back(live_[b].ids.back());
    slot.ids.push_back(live_[b].ids.back());
  }
  logits_ = decoder_.forward(sessions_, ids_);
  tokens_run_ += int64_t(live_count_);
}

std::vector<Hypothesis> BeamSearch::texts() const {
  std::vector<Hypothesis> out = finished_;
  if (!settled_)
    for (size_t b = 0; b < live_count_; ++b) out.push_back({live_[b].ids, live_[b].log_probability, false});
  std::stable_sort(out.begin(), out.end(),
                   [](const Hypothesis& a, const Hypothesis& b) { return a.score() > b.score(); });
  if (int64_t(out.size()) > options_.beams) out.resize(size_t(options_.beams));
  return out;
}

}  // namespace lacuna::model
