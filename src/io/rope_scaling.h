// src/io/rope_scaling.h - Llama 3.1's scaling of rotary frequencies: Hugging Face files hold its four numbers, GGUF
// files what each frequency is divided by (`rope_freqs.weight`).
#pragma once

#include <algorithm>
#include <numbers>

namespace lacuna::io {

struct Llama3Scaling {
  double factor, low_freq_factor, high_freq_factor, original_context;

  /// What a frequency (radians a position) is multiplied by: 1 for those that turn at least high_freq_factor times
  /// within the original context, 1 / factor for those that turn at most low_freq_factor times, between them a blend.
  /// Requires low_freq_factor < high_freq_factor.
  double multiplier(double frequency) const {
    const double turns = original_context * frequency / (2 * std::numbers::pi);
    const double kept = std::clamp((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0);
    return kept + (1 - kept) / factor;
  }
};

}  // namespace lacuna::io
