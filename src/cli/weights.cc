#include "cli/weights.h"

#include <algorithm>

#include "core/error.h"

namespace lacuna::cli {
namespace {

constexpr int64_t kGroupSize = 128, kSparseGroupSize = 16;  // as the papers have it
constexpr const char* kGroup = "Random weights";

}  // namespace

int64_t group_size_of(const layout::Layout& layout, int64_t given) {
  const auto parameters = layout::parameters(layout);
  const bool grouped = std::any_of(parameters.begin(), parameters.end(), [](const layout::Parameter& parameter) {
    return parameter.value == &layout::Params::group_size;
  });
  if (given >= 0 && !grouped)
    throw Error(
        "--group-size {}: {} has no groups of a size to choose; the gq and gs layouts, bm2, bm3, bm4 and bm8 have",
        given, layout.name);
  if (!grouped) return 0;
  if (given >= 0) return given;
  return layout.family == layout::Family::group_sparse ? kSparseGroupSize : kGroupSize;
}

void add_group_size(CLI::App& command, int64_t& group_size) {
  command
      .add_option("--group-size", group_size,
                  "gq and bm layouts: inputs of a row that share scale and zero; 0: the whole row; default: 128; gs "
                  "layouts: and are kept together; 8, 16, 32, 64 or 128; default: 16")
      ->check(integer_in(0, int64_t{1} << 31))
      ->type_name("G");
}

layout::Params WeightFlags::params(layout::Id layout, int64_t tile_rows) const {
  return {.tile_rows = tile_rows, .group_size = group_size_of(layout::get(layout), group_size)};
}

void add_weights(CLI::App& command, WeightFlags& flags, CLI::Option* needs) {
  const auto parse = [&flags](const std::string& text) {
    double value = 0;
    if (!CLI::detail::lexical_cast(text, value) || !(value >= 0 && value < 100))
      throw CLI::ValidationError("--weight-sparsity", text + " is not a share from 0 to 1 nor a percentage below 100");
    flags.sparsity = value < 1 ? value : value / 100;
  };
  CLI::Option* sparsity = command
                              .add_option_function<std::string>(
                                  "--weight-sparsity", parse,
                                  "bm and gs layouts: share of each row's weights that is dropped, 0.5 or 50 (percent)")
                              ->default_str("0")
                              ->type_name("S");
  add_group_size(command, flags.group_size);
  CLI::Option* group_size = command.get_option("--group-size");
  for (CLI::Option* option : {sparsity, group_size}) {
    option->group(kGroup);
    if (needs != nullptr) option->needs(needs);
  }
}

}  // namespace lacuna::cli
