// src/model/flux/synth.h - nets of known shapes with random weights in memory, for measuring speed.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/thread_pool.h"
#include "io/image_checkpoint.h"
#include "io/image_policy.h"
#include "model/flux/config.h"

namespace lacuna::model::flux {

struct ImageShape {
  std::string_view name;
  Config config;
};
/// flux.1-dev, flux.1-schnell, flux-moe-18b, tiny. The paper of QuaSpa gives its mixture of experts' size, 18B, and no
/// shape; this one is ours: 16 double and 40 single blocks of width 2048, 32 experts of 2048, 4 of them a token.
std::span<const ImageShape> known_image_shapes();
/// Throws Error that lists the known names.
const ImageShape& find_image_shape(std::string_view name);

/// Weights of a config.
int64_t count_parameters(const Config& config);

/// Matrices in the layouts of the policy (those that it leaves as they are stored in bf16), normal with variance 1/K;
/// norms 1, biases 0. Tensors whose names differ in numbers alone (those of all blocks, of all experts) share their
/// bytes, so that a net of any depth fits in memory. Throws Error for a layout that does not fit a matrix.
io::ImageCheckpoint random_checkpoint(std::string_view name, const Config& config, const io::ImagePolicy& policy,
                                      uint64_t seed, ThreadPool& pool);

}  // namespace lacuna::model::flux
