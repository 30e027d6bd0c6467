// src/model/beam_search.h - beam search: the likeliest texts instead of the likeliest next token.
//
// A beam is a text so far and its log-probability, the sum over its tokens. Each step extends every beam by every
// token and keeps the B likeliest that go on; an extension by a token that ends the text, if it is among the B
// likeliest of all, is finished. A text's score is its log-probability divided by its tokens, the ending one included.
// The search ends after max_tokens, or when B texts are finished of which none scores less than the best beam does so
// far. One beam is greedy decoding.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/beam_engine.h"

namespace lacuna::model {

struct Hypothesis {
  std::vector<int32_t> ids;  // without the token that ended it
  double log_probability = 0;
  bool ended = false;
  double score() const {
    const auto tokens = int64_t(ids.size()) + ended;
    return tokens > 0 ? log_probability / double(tokens) : 0;
  }
};

struct BeamOptions {
  int64_t max_tokens = 0;               // at most what the context leaves
  std::function<bool(int32_t)> ends{};  // whether a token ends the text; empty: none does
};

class BeamSearch {
 public:
  /// As many beams as the engine has, which outlives this. Throws Error for options out of range.
  BeamSearch(BeamEngine& engine, BeamOptions options);

  /// Runs the prompt. Throws Error when it is empty or does not fit.
  void start(std::span<const int32_t> prompt);
  /// One more token of every beam; false: the search has ended, nothing was done. No allocation but for finished texts.
  bool step();
  /// Texts, the best score first: those finished, and the beams where the search has not ended.
  std::vector<Hypothesis> texts() const;
  /// Tokens that went through the model since start, those of all beams.
  int64_t tokens_run() const { return tokens_run_; }

 private:
  struct Beam {
    std::vector<int32_t> ids;
    double log_probability = 0;
    int32_t parent = 0;  // the beam it extends
  };
  struct Extension {
    double log_probability = 0;
    size_t parent = 0;
    int32_t id = 0;
  };
  void collect_extensions();
  void extend();
  void run_beams();
  bool settled() const;

  BeamEngine& engine_;
  BeamOptions options_;
  int64_t limit_ = 0, tokens_run_ = 0;
  bool ended_ = true, settled_ = false;
  std::vector<Beam> live_, next_;  // [beams], of which the first live_count_ and next_count_ are in use
  size_t live_count_ = 0, next_count_ = 0;
  std::vector<Extension> extensions_;
  std::vector<Hypothesis> finished_;  // the best score first, at most `beams`
  std::vector<int32_t> parents_, ids_;
};

}  // namespace lacuna::model
