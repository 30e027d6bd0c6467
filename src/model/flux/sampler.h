// src/model/flux/sampler.h - the flow-matching Euler loop of FLUX.1, and the packing of latents into tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lacuna::model::flux {

/// Of the noise levels; keys of diffusers' scheduler_config.json (FlowMatchEulerDiscreteScheduler).
struct Schedule {
  bool dynamic = true;  // use_dynamic_shifting: the shift follows from the number of tokens
  double shift = 3;     // where it is not dynamic
  double base_shift = 0.5, max_shift = 1.15;
  int64_t base_tokens = 256, max_tokens = 4096;  // base_image_seq_len, max_image_seq_len
};

/// FLUX.1-dev's where the net has a guidance embedding, else FLUX.1-schnell's (no shift).
Schedule usual_schedule(bool guidance);
/// Of text as in scheduler_config.json. Throws Error (starting with `where`) for options that this program does not
/// have.
Schedule parse_schedule(const std::string& text, const std::string& where);

/// Noise levels: [steps + 1], from 1 down to 0. Level i of n is s = 1 - i/n, then dynamic: e^mu / (e^mu + 1/s - 1) with
/// mu linear in the number of tokens through (base_tokens, base_shift) and (max_tokens, max_shift); else
/// shift s / (1 + (shift - 1) s).
std::vector<float> noise_levels(const Schedule& schedule, int64_t steps, int64_t tokens);

/// x += (next - level) * direction.
void euler_step(std::span<float> x, std::span<const float> direction, float level, float next);

/// Latents of one image: [channels, height, width]; height and width even.
struct LatentShape {
  int64_t channels = 0, height = 0, width = 0;
  int64_t tokens() const { return height / 2 * (width / 2); }
  int64_t values() const { return channels * height * width; }
};

/// 2 x 2 pixels of all channels become a token: [height/2 * width/2, channels * 4], a token's values by channel, row,
/// column.
std::vector<float> pack_latents(std::span<const float> latents, const LatentShape& shape);
/// The inverse.
std::vector<float> unpack_latents(std::span<const float> tokens, const LatentShape& shape);
/// Coordinates (0, row, column) of each token: [tokens, 3].
std::vector<float> image_ids(const LatentShape& shape);

/// Standard normal values, a stream of its own for each image of a batch.
std::vector<float> random_latents(const LatentShape& shape, uint64_t seed, int64_t image);

}  // namespace lacuna::model::flux
