// src/cli/image.h - subcommands of `image`; each function adds one and returns its action.
#pragma once

#include "cli/command.h"

namespace lacuna::cli {

/// Pixels of an image along one side of a token: of the autoencoder 8 for each of 2 latents.
inline constexpr int64_t kPixelsPerToken = 16;
/// A multiple of kPixelsPerToken.
CLI::Validator image_side();

Action add_image_step(CLI::App& group);
Action add_image_denoise(CLI::App& group);
Action add_image_bench(CLI::App& group);
Action add_image_linear(CLI::App& group);
Action add_image_tune(CLI::App& group);
Action add_image_compress(CLI::App& group);
Action add_image_calibrate(CLI::App& group);
Action add_image_errors(CLI::App& group);
Action add_image_policy(CLI::App& group);

}  // namespace lacuna::cli
