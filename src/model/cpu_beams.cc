#include "model/cpu_beams.h"

#include <algorithm>

#include "core/error.h"

namespace lacuna::model {

CpuBeams::CpuBeams(Decoder& decoder, int64_t beams, int64_t capacity, kernels::KvType kv) : decoder_(decoder) {
  if (beams < 1 || beams > Decoder::kMostSessions)
    throw Error("{} beams; expected 1 to {}", beams, Decoder::kMostSessions);
  const auto count = size_t(beams);
  slots_.reserve(count);
  for (size_t i = 0; i < count; ++i) slots_.push_back({Session(decoder, capacity, kv), {}, false});
  slot_of_.reserve(count);
  next_.reserve(count);
  sessions_.reserve(count);
  likeliest_.resize(count);
  for (auto& list : likeliest_) list.reserve(2 * count);
  log_sum_exp_.resize(count);
}

void CpuBeams::start(std::span<const int32_t> prompt, int64_t steps) {
  for (Slot& slot : slots_) {
    slot.session.truncate(0);
    slot.ids.clear();
    slot.ids.reserve(size_t(steps));
  }
  logits_ = decoder_.forward(slots_[0].session, prompt);
  slot_of_.assign(1, 0);
  find_all_choices(1);
}

/// A beam goes on in its parent's cache; a parent's second child takes a cache that nobody goes on with, and copies
/// what differs.
void CpuBeams::assign_slots(std::span<const int32_t> parents) {
  const size_t none = slots_.size();
  for (Slot& slot : slots_) slot.taken = false;
  next_.clear();
  for (const int32_t parent : parents) {
    const size_t slot = slot_of_[size_t(parent)];
    next_.push_back(slots_[slot].taken ? none : slot);
    slots_[slot].taken = true;
  }
  for (size_t b = 0; b < parents.size(); ++b) {
    if (next_[b] != none) continue;
    const auto free = std::find_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.taken; });
    const Slot& parent = slots_[slot_of_[size_t(parents[b])]];
    const int64_t prompt = parent.session.length() - int64_t(parent.ids.size());
    const auto same = std::mismatch(free->ids.begin(), free->ids.end(), parent.ids.begin(), parent.ids.end()).first;
    const int64_t kept = free->session.length() == 0 ? 0 : prompt + (same - free->ids.begin());
    free->session.copy(parent.session, kept);
    free->ids.assign(parent.ids.begin(), parent.ids.end());
    free->taken = true;
    next_[b] = size_t(free - slots_.begin());
  }
  std::swap(slot_of_, next_);
}

void CpuBeams::step(std::span<const int32_t> parents, std::span<const int32_t> ids) {
  assign_slots(parents);
  sessions_.clear();
  for (size_t b = 0; b < ids.size(); ++b) {
    Slot& slot = slots_[slot_of_[b]];
    sessions_.push_back(&slot.session);
    slot.ids.push_back(ids[b]);
  }
  logits_ = decoder_.forward(sessions_, ids);
  find_all_choices(ids.size());
}

void CpuBeams::find_all_choices(size_t count) {
  const auto V = size_t(config().n_vocab);
  for (size_t b = 0; b < count; ++b)
    log_sum_exp_[b] = find_choices(logits_.subspan(b * V, V), 2 * beams(), likeliest_[b]);
}

BeamChoices CpuBeams::choices(int64_t beam) const { return {log_sum_exp_[size_t(beam)], likeliest_[size_t(beam)]}; }

}  // namespace lacuna::model
