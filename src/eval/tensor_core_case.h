// src/eval/tensor_core_case.h - one product of tokens and weights on tensor cores (kernels/cuda/tensor_core.h) with
// random operands: checked, then timed from graphs of launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "core/thread_pool.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tensor_core.h"
#include "layout/layout.h"

namespace lacuna::eval {

struct TensorCoreProblem {
  int64_t M = 0, N = 0, K = 0;  // tokens, outputs (of a group), inputs
  int groups = 0;               // 0: one product of all tokens
  bool skewed = false;          // group i has a share of 1/i of the tokens, not the same share
};

/// Standard normal numbers in a layout; of 2:4 the two largest of four.
struct RandomWeights {
  const layout::Layout* layout = nullptr;
  layout::Shape shape;
  std::vector<std::byte> bytes;  // canonical
  cuda::TensorCoreTiles tiles;
};
/// Throws Error for a layout that is none of f8, nm24_f8, nm24_bf16 and bf16.
RandomWeights random_weights(const layout::Layout& layout, layout::Shape shape, uint64_t seed, ThreadPool& pool);

/// Operands lie there in several copies, two to eight, so that the device's cache does not hold them where they are
/// large.
class TensorCoreCase {
 public:
  /// weights: [N max(groups, 1), K], must outlive this. Tokens are standard normal numbers in bf16, quantized as they
  /// come where the weights have 8 bits. Throws DoesNotFit.
  TensorCoreCase(cuda::Device& device, const RandomWeights& weights, const TensorCoreProblem& problem, uint64_t seed,
                 ThreadPool& pool);

  const cuda::Device& device() const { return device_; }

  /// Of the first copy. Throws Error for what launch_tensor_core refuses.
  cuda::TensorCoreArgs arguments(cuda::Accumulate accumulate, cuda::WriteBack write_back = cuda::WriteBack::staged,
                                 cuda::TensorCoreKernel kernel = cuda::TensorCoreKernel::best);

  /// ||y - reference|| / ||reference|| of sampled outputs; the reference in double precision from the codes and scales
  /// that the kernel reads.
  double error(const cuda::TensorCoreArgs& args);
  /// All results, [M, N].
  std::vector<bf16> results(const cuda::TensorCoreArgs& args);

  /// So many products, through the copies in turn.
  cuda::Graph record(const cuda::TensorCoreArgs& args, int64_t launches);
  /// ms of one run of a graph.
  double time(cuda::Graph& graph);
  /// ms of one product, in each of `runs` graphs of eight.
  std::vector<double> time_product(const cuda::TensorCoreArgs& args, int runs);
  /// ms of one quantization of the tokens; empty where the weights have 16 bits.
  std::vector<double> time_quantization(int runs);

 private:
  double input(const std::vector<std::byte>& codes, int64_t m, int64_t k) const;
  void quantize(int64_t copy);
  void launch(cuda::TensorCoreArgs args, int64_t copy);
  std::vector<double> time_runs(cuda::Graph graph, int runs);

  cuda::Device& device_;
  cuda::Stream stream_;
  const RandomWeights& weights_;
  TensorCoreProblem problem_;
  bool eight_bits_ = false;
  int64_t stride_ = 0;  // bytes
  std::vector<int32_t> offsets_;
  cuda::Buffer x_, y_, sums_, on_offsets_;
  std::vector<cuda::TensorCoreMatrix> matrices_;
  std::vector<cuda::Buffer> codes_, scales_;
};

/// A result further off would be no rounding: bf16 of y gives 2e-3, 14 bits of running sums no more than as much again
/// at K = 15360.
inline constexpr double kMostTensorCoreError = 2e-2;

/// ||a - b|| / ||b||; 0 where all bits are the same, NaN where a value is NaN.
double relative_difference(const std::vector<bf16>& a, const std::vector<bf16>& b);

}  // namespace lacuna::eval
