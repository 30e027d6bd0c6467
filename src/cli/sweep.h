// src/cli/sweep.h - `perplexity --sweep`: perplexity over the stored thresholds (SpQt, Table 3).
#pragma once

#include <string>

#include "cli/command.h"
#include "cli/sparsity.h"
#include "eval/perplexity.h"
#include "eval/realised.h"

namespace lacuna::cli {

struct SweepOptions {
  const Common& common;
  std::string model, file, text, protocol;  // text: what the file holds
  std::string output, svg;                  // empty: none
  SparsityFlags sparsity;                   // what is given of level, mode and criterion picks rows
  GpuFlags gpu;
  bool deterministic = false;  // sums in a fixed order
  eval::PerplexityOptions perplexity;
};

/// Dense, then every picked level, mode and criterion for each dense prefix, one row printed as it is measured.
int sweep(const SweepOptions& options);

/// The keys act_sparsity_asked, act_sparsity_calibrated, act_sparsity_layers, act_sparsity_layers_calibrated,
/// act_sparsity_within, act_sparsity_note.
Json realised_json(const eval::Realised& realised);

}  // namespace lacuna::cli
