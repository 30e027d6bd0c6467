// src/cli/salient.h - where a matrix's salient weights lie (GQSA, arXiv:2412.17560, Figure 1), as a drawing and as
// numbers.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace lacuna::cli {

/// Which weights of a matrix are salient.
struct SalientMap {
  std::string tensor;
  int64_t N = 0, K = 0;
  std::span<const uint8_t> top;  // [N, K]: 1 or 0
  int64_t group = 16;            // inputs of a group that would be kept or dropped as one
};

/// How they cluster: of all runs of `group` weights, the share that holds one or more of them, along rows (the groups
/// that GQSA keeps) and along columns; by_chance: the same number of weights strewn evenly, 1 - (1 - share)^group. The
/// last run of a row or column may be shorter.
struct Clustering {
  double share = 0;  // of all weights
  double row_groups = 0, column_groups = 0, by_chance = 0;
};
Clustering clustering_of(const SalientMap& map);

/// The whole matrix in at most 64 x 128 cells, darker where more of a cell's weights are salient, and beside it the
/// upper left 256 x 384 weights one by one; the numbers of clustering_of below.
std::string draw(const SalientMap& map);

}  // namespace lacuna::cli
