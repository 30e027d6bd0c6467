// src/model/flux/cuda_linear.h - the linear layers of the net on a CUDA device: weights as tensor cores read them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/cuda/tensor_core.h"
#include "kernels/cuda/tensor_core_table.h"
#include "kernels/linear.h"

namespace lacuna::model::flux {

/// Columns of an output that start at whole blocks of weights.
constexpr int64_t padded_outputs(int64_t N) {
  return (N + cuda::kTileRowsOfWeights - 1) / cuda::kTileRowsOfWeights * cuda::kTileRowsOfWeights;
}

/// Brings weights into the tensor cores' form and onto the device, one after the other. Matrices that lie at one
/// address are prepared once and uploaded as often as they are asked for.
class CudaUploader {
 public:
  /// keep: prepared matrices are kept, for those that come again.
  CudaUploader(cuda::Device& device, ThreadPool& pool, bool keep) : device_(device), pool_(pool), keep_(keep) {}
  cuda::Device& device() { return device_; }
  /// As f8, nm24_f8, nm24_bf16 or bf16, to which f32 and f16 are rounded. Throws Error naming a weight in another
  /// layout.
  const cuda::TensorCoreTiles& tiles(const kernels::WeightView& view);
  cuda::Buffer upload(std::span<const float> values, const std::string& what);
  int64_t bytes() const { return bytes_; }
  void count(int64_t bytes) { bytes_ += bytes; }

 private:
  cuda::Device& device_;
  ThreadPool& pool_;
  bool keep_;
  int64_t bytes_ = 0;
  std::map<std::tuple<const std::byte*, int64_t, int64_t>, cuda::TensorCoreTiles> kept_;
  cuda::TensorCoreTiles last_;
};

/// What a linear layer runs on: `layout` or bf16 where it is f32 or f16. Throws Error naming the weight.
cuda::Operation operation_of_weight(const kernels::WeightView& view);

/// An input as its readers want it.
struct CudaInput {
  const bf16* values = nullptr;  // rows value_stride values apart; read by weights in bf16 and nm24_bf16
  int64_t value_stride = 0;
  const std::byte* codes = nullptr;  // by weights in f8 and nm24_f8
  int64_t code_stride = 0;
  const float* scale = nullptr;
  int64_t M = 0;
};

/// What becomes of a product.
struct CudaOutput {
  void* y = nullptr;
  int64_t stride = 0;
  cuda::Element type = cuda::Element::bf16;
  int64_t gelu_from = -1;       // GELU of outputs from here on; -1: none
  const float* gate = nullptr;  // y = add + gate * product
  const void* add = nullptr;
};

/// Weights that read one input. Those of one operation are joined along N: one product for q, k, v and the MLP.
class CudaLinear {
 public:
  CudaLinear() = default;
  /// Part i's outputs begin at the sum of padded_outputs of those before it. Biases may be empty.
  CudaLinear(CudaUploader& uploader, std::span<const kernels::WeightView> parts);
  /// Experts: joined likewise, a group each.
  static CudaLinear grouped(CudaUploader& uploader, std::span<const kernels::WeightView> experts);

  /// plans: measured on this device; read by the launches alone, and by none of a kernel that is asked for.
  void run(const cuda::Device& device, cuda::Stream& stream, const cuda::TensorCoreTable& plans, const CudaInput& x,
           const CudaOutput& y, const int32_t* offsets = nullptr,
           cuda::TensorCoreKernel kernel = cuda::TensorCoreKernel::best) const;
  /// The kernels that run() takes, in words.
  std::vector<std::string> explain(const cuda::DeviceInfo& device, const cuda::TensorCoreTable& plans,
                                   const CudaInput& x, const CudaOutput& y, const int32_t* offsets = nullptr) const;
  /// Those of run()'s products that a plan may be measured for.
  std::vector<cuda::TensorCoreProduct> planned(const cuda::DeviceInfo& device, const CudaInput& x, const CudaOutput& y,
                                               const int32_t* offsets = nullptr) const;
  /// Whether a reader wants codes, or values.
  bool reads_codes() const;
  bool reads_values() const;
  int64_t K() const { return K_; }
  /// The tensors that read the input, each once, as the checkpoint names them; of experts one a group.
  const std::vector<std::string>& names() const { return names_; }
  void set_names(std::vector<std::string> names) { names_ = std::move(names); }
  double flops(int64_t M) const { return 2.0 * double(M) * weights_ / std::max(groups_, 1); }

 private:
  struct Product {
    cuda::Buffer blocks, scale, bias;
    cuda::TensorCoreWeights weights;
    int64_t column = 0;
    bool has_bias = false;
  };
  cuda::TensorCoreArgs arguments(const Product& product, const CudaInput& x, const CudaOutput& y,
                                 const int32_t* offsets) const;
  void add(CudaUploader& uploader, std::span<const kernels::WeightView> parts, int64_t column, bool whole_last);

  std::vector<Product> products_;
  std::vector<std::string> names_;
  int groups_ = 0;
  int64_t K_ = 0;
  double weights_ = 0;
};

}  // namespace lacuna::model::flux
