// src/eval/cuda_linear.h - the linear layers of one token on a CUDA device, with random weights.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "eval/group_bench.h"
#include "kernels/cuda/device.h"
#include "layout/layout.h"
#include "model/cuda_decoder.h"
#include "model/shapes.h"

namespace lacuna::eval {

struct CudaLinearOptions {
  layout::Id layout = layout::Id::zz4_k;
  int64_t n_layers = 0;  // 0: as the layers say
  double act_sparsity = 0;
  double weight_sparsity = 0;  // group-sparse layouts
  int64_t group_size = 16;     // of layouts with groups
  /// Group-sparse layouts: quarters of each matrix's outputs keep different shares of their groups; the mean is as
  /// said.
  bool uneven_rows = false;
  int runs = 10;
  uint64_t seed = 0;
  /// Sums in a fixed order.
  bool deterministic = false;
  cuda::DeviceOptions device;
};

struct CudaLinearResult {
  cuda::DeviceInfo device;
  double ceiling_gb_s = 0;
  /// Dense: one row. Sparse: each kernel collects its active inputs; lists that are ready; lists made by a kernel of
  /// their own before each product. Group-sparse: stream-K, slice-K, 8-bit inputs; as
  /// chunks tensor cores, where that is another form, and multiply-adds.
  std::vector<BenchRow> rows;
  std::vector<std::string> plans;                        // of each row: what was measured to be fastest
  std::vector<std::optional<model::CudaShares>> shares;  // of each row, where whole tokens were timed
};

/// Share of the time that making the lists takes where a kernel of its own does; 0 without such a row.
double list_share(const CudaLinearResult& result);

/// The weights of each layer as one CUDA graph: q+k+v, o, gate+up and down of a model's, or copies of one matrix. All
/// layers have the values of one random layer, each its own memory: no cache holds what is read next. Inputs are
/// normal; an input is active unless it is smaller than the threshold that leaves out the share asked for. Layouts:
/// zigzag, rows and group-sparse ones. Every output of every layer is compared with reference_linear before and after
/// the clock. The plans are those that were fastest in the whole graph. Throws Error where memory, device or layout do
/// not do.
CudaLinearResult bench_cuda_linear(const model::LinearLayers& layers, ThreadPool& pool,
                                   const CudaLinearOptions& options);

}  // namespace lacuna::eval
