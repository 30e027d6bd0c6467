// src/cli/image.h - `image`: the group of subcommands for diffusion transformers.
#pragma once

#include <utility>
#include <vector>

#include "cli/command.h"

namespace lacuna::cli {

/// A subcommand of `image` and what it does.
using ImageCommand = std::pair<CLI::App*, Action>;

/// `image compress` and `image policy`: weights.
std::vector<ImageCommand> add_image_weights(CLI::App& image);

Action add_image(CLI::App& program);

}  // namespace lacuna::cli
