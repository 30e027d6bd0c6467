// src/cli/image_bench.cc - `image bench`: time of one denoising step, by part.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "cli/command.h"
#include "cli/image.h"
#include "core/error.h"
#include "core/rng.h"
#include "io/image_checkpoint.h"
#include "layout/layout.h"
#include "model/flux/net.h"
#include "model/flux/sampler.h"
#include "model/flux/synth.h"

namespace lacuna::cli {
namespace {

using model::flux::Config;
using model::flux::kPartNames;

struct Options : Common {
  std::string model, synthetic, layout = "bf16";
  std::vector<int64_t> layers;  // double and single blocks; empty: as the shape says
  int64_t height = 512, width = 512, text_tokens = 512;
  int runs = 3;
  uint64_t seed = 0;
};

struct Row {
  std::string_view part;
  std::vector<double> ms;
  double flops = 0;

  double median() const {
    std::vector<double> sorted = ms;
    std::sort(sorted.begin(), sorted.end());
    const size_t middle = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
  double min() const { return *std::min_element(ms.begin(), ms.end()); }
  double max() const { return *std::max_element(ms.begin(), ms.end()); }
  double tflops() const { return median() > 0 ? flops / median() * 1e-9 : 0; }
};

std::vector<float> random_values(int64_t count, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = float(rng.normal());
  return out;
}

/// The parts that took time, then the whole step.
std::vector<Row> measure(model::flux::Net& net, const Options& options) {
  const Config& config = net.config();
  const int64_t rows = options.height / kPixelsPerToken, columns = options.width / kPixelsPerToken;
  const auto axes = config.rope_axes.size();
  const std::vector<float> latents = random_values(rows * columns * config.in_channels, options.seed + 1);
  const std::vector<float> text = random_values(options.text_tokens * config.text_dim, options.seed + 2);
  const std::vector<float> pooled = random_values(config.pooled_dim, options.seed + 3);
  if (axes != 3) throw Error("the net has {} rope axes; latents of images have 3 coordinates", axes);
  const std::vector<float> image_ids = model::flux::image_ids({1, 2 * rows, 2 * columns});
  const std::vector<float> text_ids(size_t(options.text_tokens) * axes, 0.0f);
  const model::flux::Inputs inputs{latents, text, pooled, 0.5, 3.5, image_ids, text_ids};
  std::vector<float> out(size_t(rows * columns * config.out_channels));

  std::vector<Row> parts(kPartNames.size());
  for (size_t i = 0; i < parts.size(); ++i) parts[i].part = kPartNames[i];
  Row step{"step", {}, 0};
  net.predict(inputs, out);  // warms up
  for (int run = 0; run < options.runs; ++run) {
    net.reset_times();
    const auto start = std::chrono::steady_clock::now();
    net.predict(inputs, out);
    step.ms.push_back(1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i].ms.push_back(1e3 * net.times().totals()[i].seconds);
      parts[i].flops = net.times().totals()[i].flops;
    }
  }
  std::erase_if(parts, [](const Row& row) { return row.max() == 0; });
  for (const Row& row : parts) step.flops += row.flops;
  parts.push_back(std::move(step));
  return parts;
}

void report(const std::vector<Row>& rows, const Options& options, const model::flux::Net& net, int64_t weight_bytes) {
  const Config& config = net.config();
  const std::string shape = options.synthetic.empty() ? options.model : options.synthetic;
  const std::string layout = options.synthetic.empty() ? "as stored" : options.layout;
  const int64_t tokens = options.height / kPixelsPerToken * (options.width / kPixelsPerToken);
  const double whole = rows.back().median();
  if (!options.json)
    print(
        fmt::format("{}, {} double and {} single blocks, {}, {} weights, {} + {} tokens, {} threads, {}\n"
                    "{:<12} {:>12} {:>24} {:>7} {:>9}\n",
                    printable(shape), config.n_double, config.n_single, layout, human_bytes(weight_bytes), tokens,
                    options.text_tokens, options.threads, kernels::isa_name(), "part", "median ms", "min .. max ms",
                    "share", "TFLOP/s"));
  for (const Row& row : rows) {
    if (options.json)
      print_json({{"bench", "image"},
                  {"shape", shape},
                  {"layout", layout},
                  {"layers", {config.n_double, config.n_single}},
                  {"height", options.height},
                  {"width", options.width},
                  {"tokens", tokens},
                  {"text_tokens", options.text_tokens},
                  {"device", options.device},
                  {"threads", options.threads},
                  {"part", row.part},
                  {"median_ms", row.median()},
                  {"min_ms", row.min()},
                  {"max_ms", row.max()},
                  {"runs", options.runs},
                  {"share", row.median() / whole},
                  {"tflops", row.tflops()},
                  {"weight_bytes", weight_bytes}});
    else
      print(fmt::format("{:<12} {:>12.3f} {:>24} {:>6.1f}% {:>9.3f}\n", row.part, row.median(),
                        fmt::format("{:.3f} .. {:.3f}", row.min(), row.max()), 100 * row.median() / whole,
                        row.tflops()));
  }
}

io::ImageCheckpoint make_or_open(const Options& options, ThreadPool& pool) {
  if (options.synthetic.empty()) return io::ImageCheckpoint::open(options.model);
  Config config = model::flux::find_image_shape(options.synthetic).config;
  if (!options.layers.empty()) {
    config.n_double = options.layers[0];
    config.n_single = options.layers[1];
  }
  model::flux::check_config(config, "--layers");
  return model::flux::random_checkpoint(options.synthetic, config, layout_named("--layout", options.layout),
                                        options.seed, pool);
}

int bench(const Options& options) {
  check_common(options);
  ThreadPool pool(options.threads);
  const io::ImageCheckpoint checkpoint = make_or_open(options, pool);
  model::flux::Net net(checkpoint, pool);
  report(measure(net, options), options, net, checkpoint.weight_bytes());
  return 0;
}

}  // namespace

Action add_image_bench(CLI::App& group) {
  auto options = std::make_shared<Options>();
  std::string names;
  for (const model::flux::ImageShape& shape : model::flux::known_image_shapes())
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  CLI::App* command = group.add_subcommand(
      "bench",
      "Time of one denoising step by part: attention, each kind of linear layer, the rest. On a model, or on random "
      "weights of a known shape.");
  CLI::Option* model = command->add_option("MODEL", options->model, "as for `image step`");
  CLI::Option* synthetic =
      command->add_option("--synthetic", options->synthetic, "random weights of one of " + names)->type_name("SHAPE");
  model->excludes(synthetic);
  command->add_option("--layers", options->layers, "only so many double and single blocks, e.g. 2,4")
      ->delimiter(',')
      ->expected(2)
      ->check(integer_in(0, 4096))
      ->needs(synthetic)
      ->type_name("D,S");
  command->add_option("--layout", options->layout, "of the random matrices of the blocks; the others are bf16")
      ->check(layout_name())
      ->needs(synthetic)
      ->capture_default_str()
      ->type_name("NAME");
  for (const auto& [name, value] : {std::pair{"--height", &options->height}, {"--width", &options->width}})
    command->add_option(name, *value, "of the image in pixels")
        ->check(image_side())
        ->capture_default_str()
        ->type_name("PIXELS");
  command->add_option("--text-tokens", options->text_tokens, "tokens of the prompt")
      ->check(integer_in(1, 65536))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--runs", options->runs, "timed repetitions; the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  add_seed(*command, options->seed, "start of the random numbers");
  add_common(*command, *options);
  return [options] {
    if (options->model.empty() && options->synthetic.empty())
      throw Error("nothing to measure: name a MODEL or give --synthetic SHAPE");
    return bench(*options);
  };
}

}  // namespace lacuna::cli
