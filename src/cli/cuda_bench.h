// src/cli/cuda_bench.h - `bench --device cuda`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/command.h"

namespace lacuna::cli {

struct CudaBenchRequest {
  const Common& common;
  std::string model, synthetic, layout;
  std::vector<std::string> what;
  double act_sparsity = 0;
  int runs = 10;
  int64_t tokens = 1, n_layers = 0;
  uint64_t seed = 0;
  bool deterministic = false, explain = false;
  int device = 0;
  double memory_gib = 0;  // 0: all
};

/// Prints one row of results a way of finding the active inputs. Throws Error for what the CUDA backend cannot do.
int run_cuda_bench(const CudaBenchRequest& request);

}  // namespace lacuna::cli
