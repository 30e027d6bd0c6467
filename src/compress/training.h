// src/compress/training.h - what training of blocks and of the whole net (block_training.h, e2e.h) share.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "core/rng.h"

namespace lacuna::compress {

/// `exact` in value, with the gradient of `x`.
inline at::Tensor straight_through(const at::Tensor& exact, const at::Tensor& x) { return x + (exact - x).detach(); }

/// So that they take no memory between steps.
inline void drop_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
}

inline void shuffle(std::vector<int64_t>& order, Rng& rng) {
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(rng.below(i))]);
}

}  // namespace lacuna::compress
