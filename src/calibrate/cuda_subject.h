// src/calibrate/cuda_subject.h - a model on an NVIDIA device as calibration runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "calibrate/subject.h"
#include "model/cuda_decoder.h"

namespace lacuna::calibrate {

/// Tokens run in batches (kernels/cuda/gemm.h); sizes are counted and small inputs left out on the device.
class CudaSubject final : public Subject {
 public:
  /// decoder: of the whole model on one device; outlives the subject. Throws DoesNotFit.
  CudaSubject(model::CudaDecoder& decoder, ThreadPool& pool);

  const model::Config& config() const override { return decoder_.config(); }
  ThreadPool& pool() const override { return pool_; }
  model::InputBytes bytes() const override { return decoder_.input_bytes(); }
  void check_group(int64_t group) const override;
  void begin(int64_t tokens) override;
  void run(std::span<const int32_t> ids, int64_t skipped, const InputObserver& observe) override;
  void score(std::span<const int32_t> ids, const model::Decoder::LogitsSink& sink) override;
  void set_sparsity(std::optional<model::SparsityOptions> options) override;
  void set_threshold(int64_t layer, model::Input input, float t) override;
  model::PerInput realised() const override;
  std::unique_ptr<BlockWalk> walk(int64_t windows, int64_t window, int64_t dense_prefix) override;

 private:
  /// Leaves out what set_sparsity() said, and counts it.
  void leave_out(const model::CudaInputs& inputs);

  model::CudaDecoder& decoder_;
  ThreadPool& pool_;
  std::optional<model::SparsityOptions> sparsity_;
  std::vector<std::array<model::SparsityCounts::Count, model::kInputs>> counts_;
  std::vector<uint32_t> bins_;
};

}  // namespace lacuna::calibrate
