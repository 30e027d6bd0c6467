// src/cli/scratch.h - files and thresholds that a benchmark makes for itself.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/sparsity.h"
#include "model/sparsity.h"

namespace lacuna::cli {

/// A file that loses its name as soon as it is written, so that nothing is left however this process ends, and is
/// opened by its descriptor.
class ScratchFile {
 public:
  /// folder: where it is written; empty: the system's folder for temporary files. write(name) makes the file.
  ScratchFile(const std::string& folder, const std::function<void(const std::string& name)>& write);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  std::string path() const;

 private:
  int descriptor_ = -1;
};

/// The folder that ScratchFile means.
std::string scratch_folder(const std::string& folder);

/// Uniform thresholds of these levels (shares, ascending) from a short run of random tokens: random weights have none,
/// and speed depends on how many inputs are left out, not on which. Says so in the log.
model::ThresholdSet thresholds_of_random_tokens(const LoadedModel& model, const std::vector<double>& levels);

/// What the flags choose for a benchmark of the model at `path`; nullopt: dense. synthetic: the shape of random
/// weights, else empty; they get thresholds of random tokens (of model.decoder) unless a file has some.
std::optional<model::Thresholds> thresholds_of_bench(const LoadedModel& model, const std::string& path,
                                                     const std::string& synthetic, const SparsityFlags& flags);

}  // namespace lacuna::cli
