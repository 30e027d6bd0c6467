// src/model/cuda_decoder.h - a decoder on an NVIDIA device: one sequence, one token at a time, each token one recorded
// graph of launches.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/cuda/device.h"
#include "model/config.h"
#include "model/sparsity.h"

namespace lacuna::model {

struct CudaDecoderOptions {
  int64_t context = 0;   // positions of the key-value cache (f16); 0: all that the model allows
  bool progress = true;  // a bar on a terminal
  /// What tokens from position dense_prefix on leave out; nullopt: nothing. Criterion magnitude.
  std::optional<Thresholds> thresholds;
  int64_t dense_prefix = 4;
};

/// Models with rotary positions, norms before their half blocks and embeddings of the model's own width; weights of a
/// layer's input all in one zigzag layout that the CUDA kernels read, or all in row layouts.
class CudaDecoder {
 public:
  /// Prepares and uploads. Throws Error naming the tensor, the layout or the feature that does not run on CUDA, and,
  /// before anything is uploaded, where weights, cache and work space do not fit the device, with what they need.
  static std::unique_ptr<CudaDecoder> load(const io::Checkpoint& checkpoint, ThreadPool& pool, cuda::Device& device,
                                           const CudaDecoderOptions& options = {});
  ~CudaDecoder();

  const Config& config() const;
  int64_t length() const;
  int64_t context() const;
  /// Forgets everything from position `length` on.
  void truncate(int64_t length);

  /// Runs a token at the next position; its logits: [n_vocab], valid until the next call. Throws Error for an id
  /// outside the vocabulary and where the context is full.
  std::span<const float> step(int32_t id);
  /// The same for `count` tokens: the first is `id`, each further one the most likely after the one before, chosen on
  /// the device: the host waits before the first one only. wait() waits for all.
  void follow(int32_t id, int64_t count);
  void wait();

  int64_t weight_bytes() const;  // read for one dense token, output head included
  int64_t device_bytes() const;  // taken: weights, cache, work space
  cuda::Stream& stream();

 private:
  struct Impl;
  explicit CudaDecoder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lacuna::model
