// tests/compress/made.h - a model compressed from random tokens: what the walk reports, and the file's bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "compress/samples.h"
#include "compress/walk.h"
#include "core/rng.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "test_support.h"

namespace lacuna::compress {

inline constexpr int64_t kWindow = 32, kWindows = 8;  // tokens, windows

struct Made {
  WalkReport report;
  std::string bytes;
};

inline Made make(const io::Checkpoint& checkpoint, const WalkOptions& options, const std::string& file) {
  const auto config = model::read_config(checkpoint);
  Rng rng(1);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kWindow * kWindows; ++i) ids.push_back(int32_t(rng.below(uint64_t(config.n_vocab))));
  const Samples samples = choose_samples(kWindow * kWindows, {.samples = kWindows, .seq_len = kWindow}, "ids");
  Made made{walk(checkpoint, ids, samples, options), {}};
  write_model(checkpoint, options.work_folder, config.n_layers, file);
  made.bytes = test::read_text(file);
  return made;
}

}  // namespace lacuna::compress
