// src/cli/image_errors.cc - `image errors`: how far a compressed diffusion transformer's results are from the
// original's.
#include <fmt/format.h>

#include <cmath>
#include <map>

#include "cli/image.h"
#include "cli/image_inputs.h"
#include "core/error.h"
#include "core/progress.h"
#include "io/image_checkpoint.h"
#include "kernels/linear.h"
#include "model/flux/net.h"

namespace lacuna::cli {
namespace {

using model::flux::LinearInput;

struct Options : Common {
  std::string model, against, inputs;
  bool layers = false;
  LoopOptions loop;
};

/// Squares of a result and of its difference from the original's.
struct Deviation {
  double error = 0, square = 0;

  void add(std::span<const float> y, std::span<const float> truth) {
    for (size_t i = 0; i < truth.size(); ++i) {
      const double difference = double(y[i]) - double(truth[i]);
      error += difference * difference, square += double(truth[i]) * double(truth[i]);
    }
  }
  /// ||y - truth|| / ||truth||; infinite where only the truth is 0.
  double relative() const { return error == 0 ? 0 : std::sqrt(error / square); }
  double snr_db() const { return -20 * std::log10(relative()); }
};

/// Errors by name in the order in which the names came.
class Table {
 public:
  Deviation& at(std::string_view name) {
    const auto [found, added] = index_.emplace(name, rows_.size());
    if (added) rows_.emplace_back(name, Deviation{});
    return rows_[found->second].second;
  }
  const std::vector<std::pair<std::string, Deviation>>& rows() const { return rows_; }

 private:
  std::vector<std::pair<std::string, Deviation>> rows_;
  std::map<std::string, size_t, std::less<>> index_;
};

kernels::WeightView view_of(const io::Tensor& tensor) {
  return {tensor.name, tensor.layout, tensor.shape, tensor.bytes, {}, tensor.params};
}

/// Each matrix of both nets on the original's input, without biases.
class LayerErrors {
 public:
  LayerErrors(const io::ImageCheckpoint& original, const io::ImageCheckpoint& compressed, ThreadPool& pool)
      : original_(original), compressed_(compressed), pool_(pool) {}

  void add(const LinearInput& input) {
    for (const std::string& weight : input.weights) {
      Pair& pair = pair_of(weight);
      y_.resize(size_t(kRows * pair.N)), truth_.resize(y_.size());
      for (int64_t row = 0; row < input.M; row += kRows) {
        const int64_t rows = std::min(kRows, input.M - row);
        kernels::Activation x;
        x.x = input.x + row * input.stride;
        x.M = rows;
        x.stride = input.stride;
        const kernels::Output truth{truth_.data(), pair.N}, y{y_.data(), pair.N};
        pair.original->run(x, std::span(&truth, 1));
        pair.compressed->run(x, std::span(&y, 1));
        const auto size = size_t(rows * pair.N);
        table_.at(weight).add(std::span(y_).first(size), std::span(truth_).first(size));
      }
    }
  }
  const Table& table() const { return table_; }

 private:
  static constexpr int64_t kRows = 256;  // tokens at once
  struct Pair {
    int64_t N = 0;
    std::unique_ptr<kernels::LinearGroup> original, compressed;
  };

  Pair& pair_of(const std::string& weight) {
    Pair& pair = pairs_[weight];
    if (pair.original) return pair;
    const io::Tensor *truth = original_.find(weight), *tensor = compressed_.find(weight);
    if (tensor == nullptr || tensor->shape != truth->shape)
      throw Error("{}: has no matrix {} of {} x {}; --layers needs both files in one naming", compressed_.path(),
                  weight, truth->shape.N, truth->shape.K);
    const kernels::WeightView views[] = {view_of(*truth), view_of(*tensor)};
    pair.N = truth->shape.N;
    pair.compressed = kernels::make_cpu_linear_group(std::span(&views[1], 1), pool_, kernels::Prepare::in_place);
    pair.original = kernels::make_cpu_linear_group(std::span(&views[0], 1), pool_, kernels::Prepare::in_place);
    return pair;
  }

  const io::ImageCheckpoint &original_, &compressed_;
  ThreadPool& pool_;
  std::map<std::string, Pair, std::less<>> pairs_;
  std::vector<float> y_, truth_;
  Table table_;
};

/// Infinity and NaN become null.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(); }

void print_rows(const char* kind, const Table& table, const io::ImageCheckpoint* compressed, bool json) {
  size_t width = std::string_view(kind).size();
  for (const auto& [name, error] : table.rows()) width = std::max(width, name.size());
  if (!json)
    print(fmt::format("{:<{}} {:<10} {:>14} {:>9}\n", kind, width, compressed != nullptr ? "layout" : "",
                      "relative error", "SNR (dB)"));
  for (const auto& [name, error] : table.rows()) {
    const std::string layout = compressed == nullptr ? "" : std::string(compressed->find(name)->layout->name);
    if (json) {
      Json row = {{"kind", kind}, {"name", name}};
      if (compressed != nullptr) row["layout"] = layout;
      row["relative_error"] = number(error.relative());
      row["snr_db"] = number(error.snr_db());
      print_json(row);
    } else {
      print(fmt::format("{:<{}} {:<10} {:>14.6g} {:>9.2f}\n", printable(name), width, layout, error.relative(),
                        error.snr_db()));
    }
  }
}

int run(const Options& options, const CLI::App& command) {
  check_common(options);
  const io::ImageCheckpoint original = io::ImageCheckpoint::open(options.against);
  const io::ImageCheckpoint compressed = io::ImageCheckpoint::open(options.model);
  ThreadPool pool(options.threads);
  model::flux::Net truth_net(original, pool), net(compressed, pool);
  if (net.config() != truth_net.config())
    throw Error("{} and {} are nets of different shapes; compare a net with the one that it was made of", options.model,
                options.against);
  const ImageInputs inputs(options.inputs, net.config(), options.loop, command);
  refuse_unused(command, {&inputs, 1});

  Table modules;
  LayerErrors layers(original, compressed, pool);
  const model::flux::InputObserver see_inputs = [&](const LinearInput& input) { layers.add(input); };
  std::map<std::string, std::vector<float>, std::less<>> truth;
  const model::flux::Observer keep = [&](std::string_view name, std::span<const float> values) {
    truth[std::string(name)].assign(values.begin(), values.end());
  };
  const model::flux::Observer compare = [&](std::string_view name, std::span<const float> values) {
    modules.at(name).add(values, truth.find(name)->second);
  };
  Progress progress("Comparing", inputs.runs(), "runs");
  std::vector<float> sample;
  inputs.run(one_by_one([&](const model::flux::Inputs& one, std::span<float> out) {
    truth_net.predict(one, out, &keep, options.layers ? &see_inputs : nullptr);
    sample.resize(out.size());
    net.predict(one, sample, &compare);
    modules.at("sample").add(sample, out);
    progress.add(1);
  }));
  progress.hide();
  print_rows("block", modules, nullptr, options.json);
  if (options.layers) print_rows("layer", layers.table(), &compressed, options.json);
  return 0;
}

}  // namespace

Action add_image_errors(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "errors",
      "How far the results of a compressed FLUX.1 transformer are from the original's on the same inputs, block by "
      "block: ||y - y0|| / ||y0|| over all tokens, images and steps, and the same as a signal-to-noise ratio in dB. A "
      "block's input is what the blocks before it made, so that errors add up; prompts follow the original's loop.");
  command->add_option("MODEL", options->model, "the compressed net, as `image step` reads it")->required();
  command->add_option("--against", options->against, "the original net")->required()->type_name("MODEL");
  command->add_option("--inputs", options->inputs, kImageInputsHelp)->required()->type_name("FILE");
  command->add_flag("--layers", options->layers,
                    "also each matrix alone, on the original's input and without bias: its own error");
  add_loop(*command, options->loop);
  add_common(*command, *options);
  return [options, command] { return run(*options, *command); };
}

}  // namespace lacuna::cli
