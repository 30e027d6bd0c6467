// src/compress/hidden_states.h - the calibration windows on their way through the layers.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <string>

#include "compress/net.h"
#include "compress/samples.h"

namespace lacuna::compress {

/// LibTorch's own threads, and those of OpenBLAS where that multiplies for it.
void use_threads(int threads);

/// The hidden states of all windows, [windows, tokens, n_embd]; the embeddings at first.
class HiddenStates {
 public:
  /// file: a mapped one for them, removed at the end; empty: in memory. Throws Error where the disk has no room for it.
  HiddenStates(const Net& net, std::span<const int32_t> ids, const Samples& samples, const std::string& file);
  ~HiddenStates();
  HiddenStates(const HiddenStates&) = delete;
  HiddenStates& operator=(const HiddenStates&) = delete;

  int64_t windows() const { return states_.size(0); }
  /// [1, tokens, n_embd] on the net's device.
  at::Tensor get(int64_t w) const { return states_[w].unsqueeze(0).to(device_); }
  /// Throws Error naming layer and window for values that are not finite.
  void set(int64_t w, const at::Tensor& hidden, int64_t layer);

 private:
  at::Device device_;
  std::string file_;
  at::Tensor states_;
};

}  // namespace lacuna::compress
