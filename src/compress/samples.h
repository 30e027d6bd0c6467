// src/compress/samples.h - windows of tokens out of a calibration text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lacuna::compress {

struct SampleOptions {
  int64_t samples = 128;   // windows
  int64_t seq_len = 2048;  // tokens of a window
  uint64_t seed = 0;
};

struct Samples {
  int64_t seq_len = 0;
  std::vector<int64_t> first;  // first token of each window in the text, ascending
  int64_t text_tokens = 0;     // of the whole text
  int64_t asked = 0;           // windows asked for

  int64_t count() const { return int64_t(first.size()); }
  int64_t tokens() const { return count() * seq_len; }
  /// "32 windows of 2048 tokens, 65536 of the text's 293115 tokens (22.4%), none twice".
  std::string describe() const;
};

/// Windows that do not overlap, all at multiples of seq_len, chosen by the seed where there are more than asked for;
/// the text's last, incomplete one is left out. A text with fewer windows than asked for gives those that it has:
/// count() < asked tells. Throws Error naming the text when it has no whole window.
Samples choose_samples(int64_t text_tokens, const SampleOptions& options, const std::string& where);

}  // namespace lacuna::compress
