// src/cli/cuda_tune.h - `tune --device cuda`.
#pragma once

#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/sparsity.h"

namespace lacuna::cli {

struct CudaTuneRequest {
  const Common& common;
  std::string model, output;   // output: empty: the profile of the card in the cache folder
  std::vector<double> levels;  // shares left out; empty: all that there are thresholds for
  std::string thresholds;      // empty: beside the model or in it
  GpuFlags gpu;
};

/// Tunes dense tokens and, where the model has zigzag weights and thresholds, those of each level; adds to the profile,
/// prints a row a product.
int run_cuda_tune(const CudaTuneRequest& request);

}  // namespace lacuna::cli
