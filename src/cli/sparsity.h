// src/cli/sparsity.h - the flags of activation sparsity that run, perplexity and bench share.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/command.h"
#include "model/sparsity.h"

namespace lacuna::cli {

struct SparsityFlags {
  double act_sparsity = 0;                  // a share; 0: dense
  std::string mode, criterion, thresholds;  // empty: the default
  int64_t dense_prefix = 4;
  std::vector<int64_t> dense_prefixes = {4};  // of a command that takes several
  bool dense = false;

  model::Criterion criterion_or_default() const {
    return criterion.empty() ? model::Criterion::magnitude : model::criterion_named(criterion);
  }
  bool sparse() const { return act_sparsity > 0; }
};

/// Adds --act-sparsity, --act-mode, --criterion, --thresholds, --dense-prefix, --dense. several_prefixes:
/// --dense-prefix takes a list and goes to dense_prefixes.
void add_sparsity(CLI::App& command, SparsityFlags& flags, bool several_prefixes = false);

/// Throws Error for a flag of add_sparsity that says how to skip where neither --act-sparsity nor --dense was given;
/// needs: what would give it a meaning.
void check_sparsity(const CLI::App& command, std::string_view needs = "--act-sparsity");

/// MODEL.thresholds.gguf beside the model.
std::string side_file(const std::string& model);

/// Kernels of a CUDA device read weights in other layouts whole, whatever is left out.
bool has_zigzag_weights(const io::Checkpoint& checkpoint);

/// The thresholds of --thresholds, else of the side file where there is one, else of the model's own metadata; nullopt
/// where that has none. Throws Error when they are damaged or of another model.
std::optional<model::ThresholdSet> find_thresholds(const io::Checkpoint& checkpoint, const std::string& path,
                                                   const SparsityFlags& flags);
/// The same; throws Error when there are none.
model::ThresholdSet load_thresholds(const io::Checkpoint& checkpoint, const std::string& path,
                                    const SparsityFlags& flags);

/// Throws Error where a weight is in a layout of which no kernel leaves inputs out: --act-sparsity would gain nothing.
void check_can_skip(const io::Checkpoint& checkpoint);
/// Inputs that kernels leave out together: the group of the first gs weight, 1 where there is none.
int64_t skipped_group(const io::Checkpoint& checkpoint);

/// What the flags choose of them; nullopt: dense. Warns where the CPU's kernels of group-sparse weights read most of
/// what is left out.
std::optional<model::Thresholds> select_thresholds(const io::Checkpoint& checkpoint, const std::string& path,
                                                   const SparsityFlags& flags, bool on_cuda);

/// Makes the decoder sparse as the flags say; nothing where they say dense. Returns what was chosen.
std::optional<model::Thresholds> apply_sparsity(const LoadedModel& model, const std::string& path,
                                                const SparsityFlags& flags, bool mask_batches);

}  // namespace lacuna::cli
