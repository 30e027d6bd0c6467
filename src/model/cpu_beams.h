// src/model/cpu_beams.h - beams of the CPU's decoder: a session each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/beam_engine.h"
#include "model/decoder.h"

namespace lacuna::model {

class CpuBeams final : public BeamEngine {
 public:
  /// Throws Error for more beams than Decoder::kMostSessions, and as Session does. decoder: outlives this.
  CpuBeams(Decoder& decoder, int64_t beams, int64_t capacity, kernels::KvType kv);

  const Config& config() const override { return decoder_.config(); }
  int64_t beams() const override { return int64_t(slots_.size()); }
  int64_t capacity() const override { return slots_[0].session.capacity(); }
  void start(std::span<const int32_t> prompt, int64_t steps) override;
  /// No allocation.
  void step(std::span<const int32_t> parents, std::span<const int32_t> ids) override;
  BeamChoices choices(int64_t beam) const override;

 private:
  /// A cache and the tokens that it holds behind the prompt.
  struct Slot {
    Session session;
    std::vector<int32_t> ids;
    bool taken = false;
  };
  /// slot_of_ of the new beams.
  void assign_slots(std::span<const int32_t> parents);
  void find_all_choices(size_t count);

  Decoder& decoder_;
  std::vector<Slot> slots_;             // [beams]
  std::vector<size_t> slot_of_, next_;  // of each beam that there is
  std::vector<Session*> sessions_;
  std::span<const float> logits_;                  // [beams that there are, vocabulary]
  std::vector<std::vector<Candidate>> likeliest_;  // [beams]
  std::vector<double> log_sum_exp_;
};

}  // namespace lacuna::model
