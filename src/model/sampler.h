// src/model/sampler.h - picks the next token from logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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

/// Order: repeat penalty, top-k, temperature, top-p, min-p, draw. Greedy takes the largest logit, the lowest id among
/// equals.
class Sampler {
 public:
  /// Throws Error for values outside their range, naming the option.
  explicit Sampler(const SamplerOptions& options, int64_t n_vocab);
  /// logits: [n_vocab]. Throws Error when one is NaN ("the model produced NaN ...").
  int32_t sample(std::span<const float> logits);
  /// Tells the sampler a token of the prompt or one that it returned, for the repeat penalty.
  void accept(int32_t id);

 private:
  SamplerOptions options_;
  Rng rng_;
  std::vector<int32_t> recent_;
  struct Candidate {
    float logit;
    int32_t id;
  };
  std::vector<Candidate> candidates_;
};

}  // namespace lacuna::model
