// src/cli/inspect.cc - `inspect`: what a model file holds.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <variant>

#include "cli/command.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model;
  bool all_metadata = false;
};

int64_t count_of(const io::Tensor& tensor) {
  int64_t count = 1;
  for (const int64_t dim : tensor.dims) count *= dim;
  return count;
}

double bits_of(int64_t bytes, int64_t count) { return count > 0 ? 8.0 * double(bytes) / double(count) : 0.0; }

/// The layout's parameters, and what share of the weights it keeps where that is not all.
std::string params_of(const io::Tensor& tensor) {
  if (tensor.layout->zigzag && tensor.params.tile_rows == 0) return "  whole columns";
  std::string out;
  for (const layout::Parameter& parameter : layout::parameters(*tensor.layout))
    out += fmt::format("  {} {}", parameter.name, tensor.params.*parameter.value);
  const int64_t kept = layout::kept_weights(*tensor.layout, tensor.shape, tensor.params);
  if (const int64_t all = tensor.shape.N * tensor.shape.K; kept < all)
    out += fmt::format("  keeps {:.1f}%", 100 * double(kept) / double(all));
  return out;
}

std::string shown(const std::string& text) {
  constexpr size_t kShown = 60;
  const std::string out = printable(text.substr(0, kShown));
  return text.size() > kShown ? fmt::format("{}... ({} bytes)", out, text.size()) : out;
}

std::string shown(const io::MetadataValue& value) {
  constexpr size_t kShown = 6;
  return std::visit(
      []<class T>(const T& v) -> std::string {
        if constexpr (std::is_same_v<T, std::string>) {
          return shown(v);
        } else if constexpr (std::is_arithmetic_v<T>) {
          if constexpr (sizeof(T) == 1 && !std::is_same_v<T, bool>)
            return fmt::format("{}", int(v));
          else
            return fmt::format("{}", v);
        } else {
          std::string out;
          for (size_t i = 0; i < v.size() && i < kShown; ++i) {
            const auto item = static_cast<typename T::value_type>(v[i]);
            if constexpr (std::is_same_v<typename T::value_type, std::string>)
              out += (i ? ", " : "") + shown(item);
            else if constexpr (sizeof(item) == 1 && !std::is_same_v<typename T::value_type, bool>)
              out += fmt::format("{}{}", i ? ", " : "", int(item));
            else
              out += fmt::format("{}{}", i ? ", " : "", item);
          }
          return fmt::format("[{}{}] ({} values)", out, v.size() > kShown ? ", ..." : "", v.size());
        }
      },
      value);
}

int inspect(const Options& options) {
  check_common(options);
  const io::Checkpoint checkpoint = open_checkpoint(options.model, options);
  int64_t params = 0, bytes = 0;
  std::map<std::string, std::pair<int64_t, int64_t>> by_layout;  // tensors, bytes
  for (const io::Tensor& tensor : checkpoint.tensors()) {
    params += count_of(tensor);
    bytes += int64_t(tensor.bytes.size());
    auto& [tensors, size] = by_layout[std::string(tensor.layout->name)];
    ++tensors;
    size += int64_t(tensor.bytes.size());
  }

  if (options.json) {
    Json tensors = Json::array();
    for (const io::Tensor& tensor : checkpoint.tensors()) {
      tensors.push_back({{"name", tensor.name},
                         {"layout", tensor.layout->name},
                         {"shape", tensor.dims},
                         {"bytes", tensor.bytes.size()},
                         {"bits", bits_of(int64_t(tensor.bytes.size()), count_of(tensor))}});
      for (const layout::Parameter& parameter : layout::parameters(*tensor.layout))
        tensors.back()[std::string(parameter.name)] = tensor.params.*parameter.value;
      const int64_t kept = layout::kept_weights(*tensor.layout, tensor.shape, tensor.params);
      if (kept < tensor.shape.N * tensor.shape.K) tensors.back()["nnz"] = kept;
    }
    print_json({{"arch", checkpoint.architecture()},
                {"params", params},
                {"bytes", bytes},
                {"effective_bits", bits_of(bytes, params)},
                {"tensors", std::move(tensors)}});
    return 0;
  }

  std::string out = fmt::format("{}\n", printable(checkpoint.path()));
  out += fmt::format("architecture    {}\n", printable(checkpoint.architecture()));
  out += fmt::format("source          {}\n", checkpoint.source() == io::Source::gguf ? "GGUF" : "Hugging Face folder");
  out += fmt::format("parameters      {} ({:.1f} million)\n", params, double(params) / 1e6);
  out += fmt::format("weights         {} ({} bytes), {:.3f} bits per weight\n", human_bytes(bytes), bytes,
                     bits_of(bytes, params));
  for (const auto& [name, counts] : by_layout)
    out += fmt::format("  {:<6}        {} tensors, {}\n", name, counts.first, human_bytes(counts.second));
  out += fmt::format("tokens          {}\n\nmetadata\n", checkpoint.vocabulary().tokens.size());
  for (const auto& [key, value] : checkpoint.metadata().entries()) {
    if (!options.all_metadata && key.starts_with("tokenizer.ggml.") && value.index() >= 12) continue;  // long arrays
    out += fmt::format("  {:<44} {}\n", printable(key), shown(value));
  }
  if (checkpoint.tensors().empty()) {
    out += "\nno tensors (a vocabulary only)\n";
  } else {
    out += fmt::format("\n{:<36} {:<7} {:>20} {:>14} {:>7}\n", "tensor", "layout", "shape", "bytes", "bits");
    for (const io::Tensor& tensor : checkpoint.tensors())
      out += fmt::format("{:<36} {:<7} {:>20} {:>14} {:>7.3f}{}\n", printable(tensor.name), tensor.layout->name,
                         fmt::format("{}", fmt::join(tensor.dims, " x ")), tensor.bytes.size(),
                         bits_of(int64_t(tensor.bytes.size()), count_of(tensor)), params_of(tensor));
  }
  print(out);
  return 0;
}

}  // namespace

Action add_inspect(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "inspect", "Show what a model holds: architecture, metadata, every tensor with its layout and bits per weight.");
  command->add_option("MODEL", options->model, "a .gguf file (any part of a split set) or a Hugging Face folder")
      ->required();
  command->add_flag("--all-metadata", options->all_metadata, "show the tokenizer's arrays too");
  add_common(*command, *options);
  return [options] { return inspect(*options); };
}

}  // namespace lacuna::cli
