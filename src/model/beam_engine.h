// src/model/beam_engine.h - what beam search (beam_search.h) needs of a model on some device: several texts that grow
// together, each by one token a step, and the likeliest next tokens of each.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/config.h"
#include "model/sampler.h"

namespace lacuna::model {

/// A beam's next token: log p(id) = logit - log_sum_exp.
struct BeamChoices {
  double log_sum_exp = 0;  // of all logits; not finite with a NaN or +infinity among them
  /// The 2 beams() largest logits, of a smaller vocabulary all, descending, the lower id first among equals. Valid
  /// until the engine's next call.
  std::span<const Candidate> likeliest;
};

class BeamEngine {
 public:
  BeamEngine() = default;
  virtual ~BeamEngine() = default;
  BeamEngine(const BeamEngine&) = delete;
  BeamEngine& operator=(const BeamEngine&) = delete;

  virtual const Config& config() const = 0;
  /// The most beams that it runs.
  virtual int64_t beams() const = 0;
  /// Tokens of prompt and text together that a beam holds.
  virtual int64_t capacity() const = 0;
  /// Forgets all beams; beam 0 becomes the prompt. steps: the most calls of step() that follow. Throws Error when the
  /// prompt is empty or does not fit.
  virtual void start(std::span<const int32_t> prompt, int64_t steps) = 0;
  /// Beam b becomes what beam parents[b] was before this call, then ids[b]. There are as many beams as ids from then
  /// on. Throws Error when they do not fit.
  virtual void step(std::span<const int32_t> parents, std::span<const int32_t> ids) = 0;
  virtual BeamChoices choices(int64_t beam) const = 0;
};

/// The `wanted` largest of logits [n_vocab] (all, where there are fewer) as BeamChoices has them, to `likeliest`.
/// Returns log_sum_exp.
double find_choices(std::span<const float> logits, int64_t wanted, std::vector<Candidate>& likeliest);

}  // namespace lacuna::model
