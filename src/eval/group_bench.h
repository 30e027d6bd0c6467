// src/eval/group_bench.h - timings of weights that read one input; every result is checked before the clock starts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/huge_buffer.h"
#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/linear.h"
#include "model/weight_groups.h"

namespace lacuna::eval {

struct BenchRow {
  std::string bench;   // "linear", "head", "gemm", "decode", "prefill"
  std::string what;    // "32 layers", "attn_q+attn_k+attn_v", "128 tokens at depth 0"
  std::string layout;  // layouts of the weights read, most bytes first: "q4_K+q6_K"
  double median_ms = 0, min_ms = 0, max_ms = 0;
  int runs = 0;
  int64_t bytes = 0;  // of weights, read in one timed unit (one token, one batch)
  double tok_s = 0;
  bool checked = false;
  double deviation = 0;         // found by the check: root mean square error over root mean square of the reference
  int64_t m = 1, n = 0, k = 0;  // rows of a product; n, k 0: several shapes
  double act_sparsity = 0;      // realised, by weight bytes
  std::optional<double> weight_sparsity;  // share of the layers' weights that is dropped, where a layout can drop some
  std::optional<double> tflops;           // dense-equivalent, for M > 1
  /// Where columns are skipped: the rate at which memory gives columns of these lengths, as many of them skipped.
  std::optional<double> access_ceiling_gb_s;

  /// `what`, of tokens that leave inputs out with their share.
  std::string label() const;
  double gb_s() const { return median_ms > 0 ? double(bytes) / median_ms / 1e6 : 0; }
};

struct BenchOptions {
  int runs = 10;
  kernels::Prepare prepare = kernels::Prepare::automatic;
  /// Linear layers alone: share of the inputs, random ones, that do not count; of gs weights whole groups. The head is
  /// dense.
  double act_sparsity = 0;
  /// How groups of zigzag weights are multiplied, and which run dense at this sparsity; nullptr: the default.
  const kernels::Plans* plans = nullptr;
  /// Every plan is split by rows.
  bool deterministic = false;

  kernels::Plan plan_of(std::span<const kernels::WeightView> parts) const;
};

/// Sets median, least, largest and their number. times: ms, at least one.
void set_times(BenchRow& row, std::vector<double> times);

/// Weights that read one input.
using Group = model::WeightGroup;

/// The groups of all layers in the order of the model. Throws Error when there are none.
std::vector<Group> model_groups(const io::Checkpoint& checkpoint);
Group head_group(const io::Checkpoint& checkpoint);

/// Names of the groups' layouts, most bytes first: "q4_K+q6_K".
std::string layouts_of(const std::vector<Group>& groups);

/// Share of the weights that is dropped; nullopt where no layout can drop any.
std::optional<double> weight_sparsity_of(const std::vector<Group>& groups);

/// A group ready to run on random inputs, with room for its outputs.
class GroupRunner {
 public:
  /// copy: the group reads its own copy of the bytes, so that two runners never share a cache line of weights.
  GroupRunner(const Group& group, int64_t m, bool copy, ThreadPool& pool, const BenchOptions& options);
  void run() { linear_->run(input(x_.data(), m_), outputs_); }
  /// Bytes that a run reads: zigzag and gs weights are read only where inputs are active.
  int64_t bytes() const;
  double sparsity() const { return sparse_ ? 1 - double(active_.size()) / double(inputs()) : 0; }
  int64_t outputs() const;
  int64_t inputs() const { return views_[0].shape.K; }
  /// Compares the first (and the last) row with the reference; returns the relative error, throws when it is too large.
  double check();

 private:
  kernels::Activation input(const float* x, int64_t m) const;

  int64_t m_;
  bool sparse_ = false;
  std::vector<int32_t> active_;  // where sparse
  std::vector<HugeBuffer> copies_;
  std::vector<kernels::WeightView> views_;
  std::unique_ptr<kernels::LinearGroup> linear_;
  std::vector<float> x_;
  std::vector<std::vector<float>> results_;
  std::vector<kernels::Output> outputs_;
};

/// Relative root mean square error of `result` against the product with the reference. input: one token. Throws Error,
/// naming the weight, where it is too large for 8-bit inputs.
double check_result(const kernels::WeightView& weight, const kernels::Activation& input, const float* result);

/// Checks one group of each combination of shapes and layouts, with a batch of m tokens; returns the largest relative
/// error.
double check_groups(const std::vector<Group>& groups, ThreadPool& pool, int64_t m, const BenchOptions& options);

/// Copies of `bytes` of weights that are rotated so that no cache holds what is read next.
int64_t cold_copies(int64_t bytes);

/// Times `groups` run one after the other, as one unit, on weights that no cache holds.
BenchRow time_groups(const std::vector<Group>& groups, ThreadPool& pool, int64_t m, const BenchOptions& options);

/// The rate, in GB/s of what is read, at which memory gives the columns of these groups when a share of them, random
/// ones, is skipped; nullopt unless all are zigzag.
std::optional<double> access_ceiling_gb_s(const std::vector<Group>& groups, double sparsity, ThreadPool& pool);

}  // namespace lacuna::eval
