// src/model/flux/embed.h - what turns the net's inputs into vectors: sinusoids of timestep and guidance, rotary angles.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lacuna::model::flux {

/// cos(t f_i) then sin(t f_i), f_i = 10000^(-i / half), half = size / 2 (Ho et al. 2020, arXiv:2006.11239). Computed in
/// double.
std::vector<float> sinusoid(double t, int64_t size);

/// cos and sin of every rotated pair: [tokens, head_dim / 2].
struct RopeTable {
  std::vector<float> cos, sin;
};
/// ids: [tokens, axes], the coordinates of each token. Pair j of an axis of d dimensions turns by
/// id * 10000^(-2j / d); the axes' pairs follow one another. Computed in double.
RopeTable rope_table(std::span<const float> ids, std::span<const int64_t> axes);

/// x / (1 + exp(-x)) of each.
void silu(std::span<float> x);

}  // namespace lacuna::model::flux
