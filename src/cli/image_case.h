// src/cli/image_case.h - what `image bench` and `image tune` run: steps of random inputs, by a model or by a net of
// random weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/image.h"
#include "io/image_checkpoint.h"
#include "model/flux/config.h"
#include "model/flux/cuda_net.h"
#include "model/flux/net.h"

namespace lacuna::cli {

/// Images of one step.
struct StepSize {
  int64_t height = 512, width = 512, batch = 1;  // height and width in pixels
  int64_t tokens() const { return height / kPixelsPerToken * (width / kPixelsPerToken); }
};

struct CaseOptions {
  std::string model, synthetic;
  std::string layers;  // double and single blocks as "D,S"; empty: as the shape says
  std::vector<std::string> sizes = {"512x512"};
  int64_t text_tokens = 512;
  uint64_t seed = 0;

  std::vector<StepSize> steps() const;
  /// Of a net's memory: the one with the most tokens. The plans are left empty.
  model::flux::CudaNetOptions largest() const;
};
/// Adds MODEL, --synthetic, --layers, --size, --text-tokens, --seed.
void add_case(CLI::App& command, CaseOptions& options);
/// Adds --policy of the random matrices.
CLI::Option* add_case_policy(CLI::App& command, std::string& policy);
CLI::Option* add_case_policies(CLI::App& command, std::vector<std::string>& policies);
/// Throws Error where neither a model nor a shape is named.
void check_case(const CaseOptions& options);

/// The model, or random weights in the layouts of the policy.
io::ImageCheckpoint open_case(const CaseOptions& options, const std::string& policy, ThreadPool& pool);

/// Random inputs of one step.
struct RandomStep {
  std::vector<float> latents, text, pooled, image_ids, text_ids;
  std::vector<model::flux::Inputs> images;
  RandomStep(const model::flux::Config& config, const StepSize& size, const CaseOptions& options);
  RandomStep(const RandomStep&) = delete;
  RandomStep& operator=(const RandomStep&) = delete;
};

}  // namespace lacuna::cli
