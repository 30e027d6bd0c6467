// src/compress/layer_influence.h - which layers of a model do least (ShortGPT, arXiv:2403.03853): those that leave the
// direction of the hidden states as it was.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compress/samples.h"
#include "io/checkpoint.h"

namespace lacuna::compress {

struct InfluenceOptions {
  at::Device device = at::kCPU;
  int threads = 1;
  std::string hidden_file = {};  // a mapped file for the windows' hidden states; empty: in memory
  bool progress = true;
};

/// Block influence of every layer of the net as it is (equation 1): 1 - the mean over all tokens of the cosine between
/// a token's hidden state before the layer and after it; 0: the layer changes lengths alone, 2: it turns all around. A
/// token whose state is 0 counts as a cosine of 0. ids: the calibration text. Throws Error naming layer and window when
/// a hidden state is not finite.
std::vector<double> block_influence(const io::Checkpoint& checkpoint, std::span<const int32_t> ids,
                                    const Samples& samples, const InfluenceOptions& options);

/// The `count` layers of the least influence, ascending; of equal ones the later. Throws Error where none would stay.
std::vector<int64_t> least_influential(std::span<const double> influence, int64_t count);

}  // namespace lacuna::compress
