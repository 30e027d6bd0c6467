// src/cli/weights.h - the flags that choose how random or quantized weights are grouped and how many are dropped.
#pragma once

#include <cstdint>

#include "cli/command.h"

namespace lacuna::cli {

/// What --group-size says of a layout; not given (< 0): 128 where the layout has groups. Throws Error where it is given
/// and the layout has none.
int64_t group_size_of(const layout::Layout& layout, int64_t given);
void add_group_size(CLI::App& command, int64_t& group_size);

/// Of random weights.
struct WeightFlags {
  double sparsity = 0;
  int64_t group_size = -1;

  layout::Params params(layout::Id layout, int64_t tile_rows = 0) const;
};
/// Adds --weight-sparsity and --group-size. `needs`: an option that they need, or nullptr.
void add_weights(CLI::App& command, WeightFlags& flags, CLI::Option* needs = nullptr);

}  // namespace lacuna::cli
