// src/compress/net.h - the runtime's model families as LibTorch operations: what calibration text runs through while
// matrices are replaced one by one, and what gradients go through.
//
// The net presents itself as the GGUF file made from the checkpoint would: names, order of q and k rows, rotary pairs.
// Everything is float32, whatever the checkpoint holds. Layers are loaded one at a time, so that memory holds one layer
// and what the caller keeps.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <functional>
#include <utility>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "model/block.h"
#include "model/config.h"
#include "model/sparsity.h"

namespace lacuna::compress {

/// x W^T of a matrix that is not held as it is: x: [.., K] -> [.., N].
using Product = std::function<at::Tensor(const at::Tensor& x)>;

struct Norm {
  at::Tensor weight, bias;  // [n_embd]; bias only of layer norms
};

/// What makes logits of the last layer's result.
struct Head {
  at::Tensor weight, bias;                   // [n_vocab, width]
  at::Tensor project_out, project_out_bias;  // [width, n_embd] where the embeddings are narrower than the net
  Norm norm;                                 // undefined weight: none
};

/// One layer's tensors. Matrices are [N, K], by model::Matrix; gate is undefined in nets that are not gated, a bias
/// where the checkpoint has none. A product, where there is one, is taken instead of the matrix.
struct Layer {
  std::array<at::Tensor, model::kMatrices> weight, bias;
  std::array<Product, model::kMatrices> product;
  Norm attn_norm, ffn_norm;
  at::Tensor q_norm, k_norm;  // [head_dim], Qwen3
};

class Net {
 public:
  /// Called with the input of a group of matrices before they are applied: x: [tokens, K].
  using Tap = std::function<void(model::Input, const at::Tensor& x)>;

  /// The checkpoint must outlive the net. Throws Error for what the runtime would refuse too.
  /// pool: for the runtime's attention, on the CPU and without gradients; else, and with nullptr, causal_attention. The
  /// table of embeddings stays on the CPU.
  explicit Net(const io::Checkpoint& checkpoint, at::Device device = at::kCPU, ThreadPool* pool = nullptr);

  const model::Config& config() const { return config_; }
  at::Device device() const { return device_; }
  Layer load_layer(int64_t index) const;
  /// The layer without its matrices.
  Layer load_vectors(int64_t index) const;
  Head load_head() const;

  /// ids: [windows, tokens] int64, each window from position 0 -> [windows, tokens, n_embd].
  at::Tensor embed(const at::Tensor& ids) const;
  /// hidden: [windows, tokens, n_embd] -> the same after the layer.
  at::Tensor forward(const Layer& layer, const at::Tensor& hidden, const Tap& tap = {}) const;
  /// Calls tap for the inputs of the layer's matrices, as forward does, and leaves out what comes after the last.
  void inputs(const Layer& layer, const at::Tensor& hidden, const Tap& tap) const;
  /// [windows, tokens, n_embd] -> [windows, tokens, n_vocab].
  at::Tensor logits(const Head& head, const at::Tensor& hidden) const;

  /// A tensor of the checkpoint in GGUF's order of rows, decoded: [N, K] of a matrix, [n] of a vector.
  at::Tensor read(const io::Tensor& tensor) const;

 private:
  /// What the layer adds its last matrix's product to, and that matrix's input.
  std::pair<at::Tensor, at::Tensor> to_last_input(const Layer& layer, const at::Tensor& hidden, const Tap& tap) const;
  at::Tensor norm(const Norm& weights, const at::Tensor& x) const;
  at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) const;
  at::Tensor attend(const Layer& layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  at::Tensor attend_with_kernels(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  at::Tensor read_on_cpu(const io::Tensor& tensor) const;
  at::Tensor maybe(const std::string& name) const;

  const io::Checkpoint& checkpoint_;
  model::Config config_;
  at::Device device_;
  ThreadPool* pool_;
  bool adjacent_ = false;  // rotary pairs of the rows as read() orders them
  at::Tensor embedding_;   // on the CPU
  at::Tensor positions_, project_in_, project_in_bias_;
};

}  // namespace lacuna::compress
