// src/cli/cuda_bench.h - `bench --device cuda`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/profile.h"
#include "cli/sparsity.h"
#include "layout/layout.h"

namespace lacuna::cli {

struct CudaBenchRequest {
  const Common& common;
  std::string path;              // of decoding: the model, or a file of random weights
  std::string synthetic, shape;  // shape: what is timed, for people
  std::string layout;
  std::vector<std::string> what;
  SparsityFlags sparsity;
  int runs = 10;
  int64_t tokens = 1, n_layers = 0;
  int64_t prompt = 512;           // tokens of a prefill
  std::vector<int64_t> gens;      // tokens decoded
  std::vector<int64_t> contexts;  // after so many
  uint64_t seed = 0;
  layout::Params params;  // of linear layers' random weights
  double weight_sparsity = 0;
  bool uneven_rows = false;
  bool explain = false;
  ProfileFlags profile;
  bool tune = false;          // decoding: find plans first
  bool beside_dense = false;  // decoding, with sparsity: dense tokens too
  GpuFlags gpu;
};

/// Throws Error for what the CUDA backend cannot do.
void check_cuda_bench(const CudaBenchRequest& request);
/// Prints the rows of results: of the linear layers one a way of finding the active inputs, or of sharing out groups.
int run_cuda_bench(const CudaBenchRequest& request);

}  // namespace lacuna::cli
