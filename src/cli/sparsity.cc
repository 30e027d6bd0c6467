#include "cli/sparsity.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "core/error.h"
#include "core/files.h"
#include "io/gguf_metadata.h"

namespace lacuna::cli {

void add_sparsity(CLI::App& command, SparsityFlags& flags, bool several_prefixes) {
  constexpr const char* kGroup = "Activation sparsity";
  const auto parse = [&flags](const std::string& text) {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value) || !(value >= 0 && value < 100))
      throw CLI::ValidationError("--act-sparsity", text + " is not a share from 0 to 1 nor a percentage below 100");
    flags.act_sparsity = value < 1 ? value : value / 100;
  };
  CLI::Option* sparsity =
      command
          .add_option_function<std::string>(
              "--act-sparsity", parse,
              "share of each layer's inputs to skip, 0.5 or 50 (percent); needs thresholds (see `lacuna calibrate`); "
              "0: dense")
          ->default_str("0")
          ->type_name("S")
          ->group(kGroup);
  command
      .add_option("--act-mode", flags.mode,
                  "how the share is spread: uniform, greedy or layered; default: the best one that is stored")
      ->check(CLI::IsMember({"uniform", "greedy", "layered"}))
      ->type_name("MODE")
      ->group(kGroup);
  command
      .add_option("--criterion", flags.criterion,
                  "what makes an input small: its magnitude, or times its column's norm (wina); default: magnitude")
      ->check(CLI::IsMember({"magnitude", "wina"}))
      ->type_name("NAME")
      ->group(kGroup);
  command
      .add_option("--thresholds", flags.thresholds,
                  "file of thresholds; default: MODEL.thresholds.gguf where it exists, else the model's own")
      ->type_name("FILE")
      ->group(kGroup);
  const std::string prefix = "first positions that never skip anything";
  CLI::Option* dense_prefix =
      several_prefixes
          ? command.add_option("--dense-prefix", flags.dense_prefixes, prefix + "; 0,4: --sweep does both")
                ->delimiter(',')
          : command.add_option("--dense-prefix", flags.dense_prefix, prefix);
  dense_prefix->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str()
      ->type_name(several_prefixes ? "LIST" : "P")
      ->group(kGroup);
  command.add_flag("--dense", flags.dense, "skip nothing, whatever thresholds there are (the default)")
      ->excludes(sparsity)
      ->group(kGroup);
}

void check_sparsity(const CLI::App& command, std::string_view needs) {
  if (command.count("--act-sparsity") + command.count("--dense") == 0)
    refuse_given(command, {"--act-mode", "--criterion", "--thresholds", "--dense-prefix"}, needs);
}

std::string side_file(const std::string& model) {
  std::filesystem::path path = std::filesystem::path(model).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();  // a folder written with a slash
  if (path.extension() == ".gguf") path.replace_extension();
  return path.string() + ".thresholds.gguf";
}

bool has_zigzag_weights(const io::Checkpoint& checkpoint) {
  return std::ranges::any_of(checkpoint.tensors(), [](const io::Tensor& tensor) { return tensor.layout->zigzag; });
}

namespace {

/// The file that holds thresholds, which may be the model.
std::string thresholds_file(const std::string& path, const SparsityFlags& flags) {
  if (!flags.thresholds.empty()) return flags.thresholds;
  return file_exists(side_file(path)) ? side_file(path) : path;
}

}  // namespace

std::optional<model::ThresholdSet> find_thresholds(const io::Checkpoint& checkpoint, const std::string& path,
                                                   const SparsityFlags& flags) {
  const std::string from = thresholds_file(path, flags);
  auto set = from == path ? model::ThresholdSet::read(checkpoint.metadata(), path)
                          : model::ThresholdSet::read(io::read_gguf_metadata(from), from);
  if (set) set->check_fits(model::read_config(checkpoint), from);
  return set;
}

model::ThresholdSet load_thresholds(const io::Checkpoint& checkpoint, const std::string& path,
                                    const SparsityFlags& flags) {
  auto set = find_thresholds(checkpoint, path, flags);
  if (!set)
    throw Error(
        "{}: holds no thresholds of activation sparsity, so only dense can run; make them with `lacuna calibrate {} "
        "--text FILE`",
        thresholds_file(path, flags), path);
  return std::move(*set);
}

namespace {

/// Kernels of one token leave out groups of inputs, and only whole ones.
bool skips_groups(const io::Tensor& tensor) {
  return tensor.layout->family == layout::Family::group_sparse && tensor.layout->bits < 16;
}

}  // namespace

void check_can_skip(const io::Checkpoint& checkpoint) {
  for (const io::Tensor& tensor : checkpoint.tensors())
    if (tensor.layout->family != layout::Family::rows && !tensor.layout->zigzag && !skips_groups(tensor))
      throw Error(
          "--act-sparsity: {} is {}, of which no kernel leaves inputs out; leave the flag out, or store the model in a "
          "zigzag layout (`lacuna quantize --layout zz4_k`)",
          tensor.name, tensor.layout->name);
}

int64_t skipped_group(const io::Checkpoint& checkpoint) {
  for (const io::Tensor& tensor : checkpoint.tensors())
    if (skips_groups(tensor)) return tensor.params.group_size;
  return 1;
}

std::optional<model::Thresholds> select_thresholds(const io::Checkpoint& checkpoint, const std::string& path,
                                                   const SparsityFlags& flags, bool on_cuda) {
  if (!flags.sparse()) return std::nullopt;
  check_can_skip(checkpoint);
  const model::ThresholdSet set = load_thresholds(checkpoint, path, flags);
  const auto mode = flags.mode.empty() ? std::nullopt : std::optional(model::mode_named(flags.mode));
  if (const int64_t group = skipped_group(checkpoint); !on_cuda && set.group % group != 0)
    spdlog::warn(
        "these weights are read in groups of {} inputs, the thresholds leave out {} of them together: most of that is "
        "read all the same; `lacuna calibrate --group {}` makes others",
        group, set.group, group);
  return set.select(flags.act_sparsity, mode, flags.criterion_or_default(),
                    flags.thresholds.empty() ? path : flags.thresholds);
}

std::optional<model::Thresholds> apply_sparsity(const LoadedModel& model, const std::string& path,
                                                const SparsityFlags& flags, bool mask_batches) {
  auto thresholds = select_thresholds(model.checkpoint, path, flags, false);
  if (thresholds) model.decoder->set_sparsity(model::SparsityOptions{*thresholds, flags.dense_prefix, mask_batches});
  return thresholds;
}

}  // namespace lacuna::cli
