// src/model/flux/moe.h - a mixture of experts in place of an MLP.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "model/flux/binder.h"
#include "model/flux/config.h"
#include "model/flux/linear.h"
#include "model/flux/part_times.h"

namespace lacuna::model::flux {

/// Which experts the tokens go to.
struct Routing {
  std::vector<int64_t> offsets;  // [experts + 1]: where each expert's rows begin
  std::vector<int64_t> token;    // [M * top_k]: of a row
  std::vector<float> weight;     // [M * top_k]: of a row's result
};

/// The top_k largest of each row of logits, an expert's rows in the order of their tokens; of equal logits the lower
/// expert wins. Weights are softmax over all experts, divided by their sum where config.normalize. logits: [M,
/// experts].
Routing route(std::span<const float> logits, const MoeConfig& config);

/// y = sum of weight_e * down_e(gelu(up_e(x))) over each token's experts.
class Experts {
 public:
  Experts(Binder& binder, const std::string& name, const Config& config, ThreadPool& pool);
  /// x, y: [M, width]. observer: may be nullptr.
  void run(ThreadPool& pool, const float* x, int64_t M, float* y, PartTimes& times, const InputObserver* observer);

 private:
  MoeConfig config_;
  int64_t width_;
  Linear gate_;
  GroupedLinear up_, down_;
  std::vector<float> logits_, rows_, inner_, results_;
};

}  // namespace lacuna::model::flux
