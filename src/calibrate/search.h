// src/calibrate/search.h - which inputs of a block can be left out most cheaply: TEAL's greedy search
// (arXiv:2408.14690, Alg. 1).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "calibrate/block_trials.h"
#include "calibrate/histogram.h"
#include "model/block.h"

namespace lacuna::calibrate {

struct SearchOptions {
  double step = 0.02;        // of the block's weight bytes, in one step
  double matrix_step = 0.1;  // at most this much of one matrix in one step
  int64_t dense_prefix = 4;  // of the trials
  int64_t group = 1;         // inputs that are left out together
  /// true: every candidate is tried anew in each step, as the paper writes. false: a candidate keeps what it cost when
  /// it was last tried until it comes first (costs rarely fall), which tries about a fifth as many.
  bool exhaustive = false;
};

/// A point of the search.
struct SearchPoint {
  double sparsity = 0;                            // of the block's weight bytes
  std::array<double, model::kInputs> share = {};  // of each input
  double error = 0;                               // of the block's output: |y - dense|^2 / |dense - x|^2
};

/// From nothing left out to at least `until`. block: what the dense model gives it is what it is tried on. Every matrix
/// has a share of its own during the search: in each step the one whose raise adds the least error per byte is
/// raised by step / its share of the block's bytes (at most matrix_step). The shares of an input are the means of its
/// matrices' shares, weighted by their bytes, so that the block's sparsity stays. sizes: of each input under the
/// criterion; norms: [inputs] column norms, or nullptr for magnitude.
std::vector<SearchPoint> search_block(BlockTrials& block, const std::array<Histogram, model::kInputs>& sizes,
                                      const std::array<std::vector<float>, model::kInputs>* norms, double until,
                                      const SearchOptions& options);

/// The point at `sparsity`, interpolated between its neighbours.
SearchPoint point_at(const std::vector<SearchPoint>& path, double sparsity);

/// |y - dense|^2 / |dense - x|^2 of the block with these shares of its inputs.
double block_error(model::Block& block, const float* x, const std::array<Histogram, model::kInputs>& sizes,
                   const std::array<std::vector<float>, model::kInputs>* norms,
                   const std::array<double, model::kInputs>& share, int64_t dense_prefix);

}  // namespace lacuna::calibrate
