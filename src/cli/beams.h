// src/cli/beams.h - `run --beams`: the likeliest texts after a prompt.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cli/command.h"
#include "cli/generate.h"
#include "model/beam_search.h"

namespace lacuna::cli {

struct BeamRun {
  Generation best;
  std::vector<model::Hypothesis> texts;  // the best score first
  int64_t beam_tokens = 0;               // that went through the model behind the prompt, of all beams
};

/// max_tokens as of generate; the best text's ids and text come in `best`, with the timing of the whole search.
BeamRun search_beams(const LoadedModel& model, model::BeamEngine& engine, std::span<const int32_t> prompt,
                     const GenerateOptions& options);

/// The text of these tokens.
std::string text_of(const LoadedModel& model, std::span<const int32_t> ids);

}  // namespace lacuna::cli
