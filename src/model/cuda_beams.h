// src/model/cuda_beams.h - beams on an NVIDIA device: a step of all of them is one recorded graph of launches, which
// reads the weights once. The prompt's keys and values are the decoder's; those behind it lie in a slot for each beam,
// and which slot has whose is a table on the device that each step puts into the order of the new beams.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/cuda/beams.h"
#include "kernels/cuda/device.h"
#include "model/beam_engine.h"
#include "model/engine.h"

namespace lacuna::model {

class CudaShard;
struct Group;

/// Several beams are dense, a single one runs as the decoder's tokens do. Group-sparse weights are read once for each
/// beam.
class CudaBeams final : public BeamEngine {
 public:
  /// decoder: whose only shard is `shard`; both outlive this. start() overwrites its sequence, and nothing else may
  /// run there until the last step. Throws Error for more beams than cuda::kMostBeams, and DoesNotFit.
  CudaBeams(Engine& decoder, CudaShard& shard, int64_t beams);

  const Config& config() const override { return decoder_.config(); }
  int64_t beams() const override { return beams_; }
  int64_t capacity() const override { return decoder_.capacity(); }
  /// Throws DoesNotFit also where the keys and values of `steps` tokens of each beam do not fit.
  void start(std::span<const int32_t> prompt, int64_t steps) override;
  void step(std::span<const int32_t> parents, std::span<const int32_t> ids) override;
  BeamChoices choices(int64_t beam) const override;

 private:
  void take_workspace();
  /// Room for the keys and values of so many steps.
  void take_cache(int64_t steps);
  void find_choices_of_one(std::span<const float> logits);
  // ---- launches of a step ----
  void record();
  void record_layer(int64_t index);
  void record_choices();
  /// The residual stream += `add`, of rows add_row floats apart (nullptr: nothing), through a norm to h_.
  void norm(const float* add, int64_t add_row, const float* weight, const float* bias, const cuda::Preset& preset);
  /// y [beams, group.outputs] of x, rows x_stride apart.
  void multiply(const Group& group, const float* x, int64_t x_stride, float* y);
  cuda::Preset preset_of(const Group& group, float* y) const;

  Engine& decoder_;
  CudaShard& shard_;
  int64_t beams_ = 0, wanted_ = 0;  // choices of each beam
  int64_t prompt_ = 0, steps_ = 0, steps_done_ = 0, room_ = 0;
  std::vector<std::vector<Candidate>> likeliest_;  // [beams]
  std::vector<double> log_sum_exp_;

  cuda::Buffer space_, step_, sources_, cache_;
  cuda::Buffer attention_workspace_, top_k_workspace_, sum_workspace_;
  cuda::Buffer partial_, arrived_;  // of products in a fixed order, empty: in any
  cuda::Buffer found_;              // candidates, [beams, wanted + 1], then log_sum_exp, [beams]
  std::vector<cuda::TopKCandidate> found_here_;
  // Rows of all beams; *_y_: results of a group.
  float *x_ = nullptr, *h_ = nullptr, *attended_ = nullptr, *gated_ = nullptr, *qkv_y_ = nullptr, *o_y_ = nullptr,
        *up_y_ = nullptr, *down_y_ = nullptr, *logits_ = nullptr;
  std::optional<cuda::Graph> graph_;
};

}  // namespace lacuna::model
