// src/model/flux/cuda_net.h - the FLUX.1 transformer on a CUDA device: bf16 activations, products on tensor cores in
// bf16, FP8 and their 2:4 forms, one step as one recorded graph.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "core/thread_pool.h"
#include "io/image_checkpoint.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tensor_core_table.h"
#include "model/flux/config.h"
#include "model/flux/net.h"
#include "model/flux/part_times.h"

namespace lacuna::model::flux {

/// Milliseconds and floating-point operations of a step by part, the kernels of its products in words, each once, and
/// the products that plans may be measured for.
struct CudaPartTimes {
  std::array<double, kPartNames.size()> ms = {}, flops = {};
  std::array<std::vector<std::string>, kPartNames.size()> kernels = {};
  std::set<cuda::TensorCoreProduct> planned;
};

/// The input of a linear layer on the device, and the tensors that read it, as LinearInput has them. What is launched
/// on `stream` while it is seen may read it.
struct CudaLinearInput {
  std::span<const std::string> weights;
  const bf16* x = nullptr;  // [M, K], aligned to 16 bytes, rows `stride` values apart, a multiple of 8
  int64_t M = 0, K = 0, stride = 0;
  cuda::Stream* stream = nullptr;
};
/// Sees inputs before the layer runs.
using CudaInputObserver = std::function<void(const CudaLinearInput& input)>;

struct CudaNetOptions {
  bool progress = true;  // a bar on a terminal
  /// The largest step that is to run: images, and tokens of one. Zeros: not known yet.
  int64_t images = 0, text_tokens = 0, image_tokens = 0;
  const cuda::TensorCoreTable* plans = nullptr;  // of products, measured on this device; the net keeps a copy
};

/// The largest ||a - b|| / ||b|| of a row; infinity where a row of b is zero and that of a is not, or a value is not
/// finite. a, b: [rows][width].
double largest_deviation(std::span<const float> a, std::span<const float> b, int64_t width);

class CudaNet {
 public:
  /// Prepares and uploads every weight, one after the other; the pool prepares, the device outlives the net. Throws
  /// Error naming tensor and file, or what does not run on CUDA, and DoesNotFit, before anything is uploaded, where the
  /// weights and the work space of the largest step do not fit.
  CudaNet(const io::ImageCheckpoint& checkpoint, ThreadPool& pool, cuda::Device& device,
          const CudaNetOptions& options = {});
  ~CudaNet();
  CudaNet(const CudaNet&) = delete;
  CudaNet& operator=(const CudaNet&) = delete;

  const Config& config() const;
  int64_t weight_bytes() const;  // on the device

  /// One step of several images of one size and number of text tokens, with the same coordinates. out: [images][image
  /// tokens, out_channels]. observer: sees the blocks' results, of all images one after the other; the step is then
  /// launched piece by piece. layers: sees the inputs of every linear layer, of all images one after the other,
  /// likewise; what it throws ends the step. Throws Error for inputs that do not fit, DoesNotFit where work space does
  /// not, and naming the block after which a value is not finite.
  void predict(std::span<const Inputs> images, std::span<float> out, const Observer* observer = nullptr,
               const CudaInputObserver* layers = nullptr);

  /// largest_deviation of a token's results of the last predict()'s step from the same step by kernels that every
  /// device runs: other instructions, tiles and orders of sums. Of a net with experts that of all results together, for
  /// a token whose choice is close may go to another expert. 0 where the device has no others.
  double deviation();
  /// Milliseconds on the device of the last predict()'s step run again: the whole from a graph without marks, the parts
  /// from one with a mark where the part changes.
  double time_step();
  CudaPartTimes time_parts();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lacuna::model::flux
