// src/model/binder.h - the tensors of a model, found by name.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "io/checkpoint.h"
#include "kernels/linear.h"
#include "model/config.h"
#include "model/layer_ops.h"

namespace lacuna::model {

/// Finds tensors by name, checks their shapes and notes which were used.
class Binder {
 public:
  Binder(const io::Checkpoint& checkpoint, std::deque<std::vector<float>>& biases)
      : checkpoint_(checkpoint), biases_(biases) {}

  bool has(const std::string& name) const { return checkpoint_.find(name) != nullptr; }

  const io::Tensor& matrix(const std::string& name, int64_t N, int64_t K) {
    const io::Tensor& tensor = checkpoint_.require(name);
    used_.insert(name);
    if (tensor.shape != layout::Shape{N, K})
      throw Error("{}: tensor {} is {} x {}, the model's metadata asks for {} x {}", checkpoint_.path(), name,
                  tensor.shape.N, tensor.shape.K, N, K);
    return tensor;
  }

  std::vector<float> vector(const std::string& name, int64_t K) { return read_vector(matrix(name, 1, K)); }

  /// `name`.weight with its bias, if the file has one.
  kernels::WeightView weight(const std::string& name, int64_t N, int64_t K) {
    const io::Tensor& tensor = matrix(name + ".weight", N, K);
    kernels::WeightView view{tensor.name, tensor.layout, tensor.shape, tensor.bytes, {}, tensor.params};
    if (has(name + ".bias")) view.bias = biases_.emplace_back(vector(name + ".bias", N));
    return view;
  }

  NormWeights norm(const std::string& name, const Config& config) {
    NormWeights out;
    out.weight = vector(name + ".weight", config.n_embd);
    if (config.norm == Norm::layer) out.bias = vector(name + ".bias", config.n_embd);
    return out;
  }

  void ignore(const std::string& name) { used_.insert(name); }

  /// A tensor that nothing reads means a model that this program does not know.
  void check_all_used() const {
    for (const io::Tensor& tensor : checkpoint_.tensors())
      if (!used_.contains(tensor.name))
        throw Error("{}: tensor {} has no place in a model of architecture {}; its result would be wrong without it",
                    checkpoint_.path(), tensor.name, checkpoint_.architecture());
  }

 private:
  const io::Checkpoint& checkpoint_;
  std::deque<std::vector<float>>& biases_;
  std::set<std::string> used_;
};

}  // namespace lacuna::model
