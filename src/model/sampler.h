// src/model/sampler.h - picks the next token from logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/error.h"
#include "core/rng.h"

namespace lacuna::model {

struct SamplerOptions {
  float temperature = 0.8f;     // 0: greedy
  int64_t top_k = 40;           // 0: off
  float top_p = 0.95f;          // 1: off
  float min_p = 0.05f;          // 0: off
  float repeat_penalty = 1.0f;  // 1: off; positive logits are divided by it, negative ones multiplied
  int64_t repeat_window = 64;
  uint64_t seed = 0;
};

/// A logit that no model should give.
class BadLogits : public Error {
 public:
  using Error::Error;
};

struct Candidate {
  float logit;
  int32_t id;
};

/// Order: repeat penalty, top-k, temperature, top-p, min-p, draw. Greedy takes the largest logit, the lowest id among
/// equals.
class Sampler {
 public:
  /// Throws Error for values outside their range, naming the option.
  explicit Sampler(const SamplerOptions& options, int64_t n_vocab);
  /// logits: [n_vocab]. Throws BadLogits when one is NaN or infinity, or all are -infinity.
  int32_t sample(std::span<const float> logits);
  /// The same in two steps, for logits that are elsewhere. How many of the largest logits choose() wants; 0: all.
  int64_t wanted() const;
  /// The ids whose logits the penalty changes first, each once.
  std::span<const int32_t> penalized();
  float repeat_penalty() const { return options_.repeat_penalty; }
  /// candidates: the wanted() largest logits after the penalty, descending, the lower id first among equals. Throws
  /// BadLogits when all are -infinity. Overwrites their logits.
  int32_t choose(std::span<Candidate> candidates);
  /// Tells the sampler a token of the prompt or one that it returned, for the repeat penalty.
  void accept(int32_t id);

 private:
  SamplerOptions options_;
  Rng rng_;
  std::vector<int32_t> recent_, penalized_;
  std::vector<Candidate> candidates_;
};

}  // namespace lacuna::model
