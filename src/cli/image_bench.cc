// src/cli/image_bench.cc - `image bench`: time of one denoising step, by part.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

#include "cli/command.h"
#include "cli/image.h"
#include "cli/image_net.h"
#include "core/error.h"
#include "core/rng.h"
#include "io/image_checkpoint.h"
#include "io/image_policy.h"
#include "model/flux/sampler.h"
#include "model/flux/synth.h"

namespace lacuna::cli {
namespace {

using model::flux::Config;
using model::flux::kPartNames;

/// Images of one step.
struct Size {
  int64_t height = 512, width = 512, batch = 1;  // height and width in pixels
  int64_t tokens() const { return height / kPixelsPerToken * (width / kPixelsPerToken); }
};

/// "HEIGHTxWIDTH" or "HEIGHTxWIDTHxBATCH".
Size parse_size(const std::string& text) {
  Size out;
  char left = 0;
  const int read = std::sscanf(text.c_str(), "%ldx%ldx%ld%c", &out.height, &out.width, &out.batch, &left);
  const auto is_side = [](int64_t side) { return image_side()(std::to_string(side)).empty(); };
  const auto digits = std::string_view("0123456789x");
  if (read < 2 || read > 3 || text.find_first_not_of(digits) != text.npos || text.back() == 'x' ||
      !is_side(out.height) || !is_side(out.width) || out.batch < 1 || out.batch > 1024)
    throw Error(
        "'{}' is no size of a step: HEIGHTxWIDTH or HEIGHTxWIDTHxBATCH, in pixels, multiples of {}; at most 1024 "
        "images",
        text, kPixelsPerToken);
  return out;
}

struct Options : Common {
  std::string model, synthetic, policy = "bf16";
  std::vector<int64_t> layers;  // double and single blocks; empty: as the shape says
  std::vector<std::string> sizes = {"512x512"};
  int64_t text_tokens = 512;
  int runs = 3;
  uint64_t seed = 0;
  GpuFlags gpu;
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

/// Random inputs of one step.
struct RandomInputs {
  std::vector<float> latents, text, pooled, image_ids, text_ids;
  std::vector<model::flux::Inputs> images;

  RandomInputs(const Config& config, const Size& size, const Options& options) {
    const int64_t rows = size.height / kPixelsPerToken, columns = size.width / kPixelsPerToken;
    const size_t axes = config.rope_axes.size();
    if (axes != 3) throw Error("the net has {} rope axes; latents of images have 3 coordinates", axes);
    const int64_t B = size.batch;
    latents = random_values(B * size.tokens() * config.in_channels, options.seed + 1);
    text = random_values(B * options.text_tokens * config.text_dim, options.seed + 2);
    pooled = random_values(B * config.pooled_dim, options.seed + 3);
    image_ids = model::flux::image_ids({1, 2 * rows, 2 * columns});
    text_ids.resize(size_t(options.text_tokens) * axes);
    const auto part = [&](const std::vector<float>& of, int64_t b) {
      return std::span(of).subspan(of.size() / size_t(B) * size_t(b), of.size() / size_t(B));
    };
    for (int64_t b = 0; b < B; ++b)
      images.push_back({part(latents, b), part(text, b), part(pooled, b), 0.5, 3.5, image_ids, text_ids});
  }
};

/// The parts that took time, then the whole step.
std::vector<Row> measure(ImageNet& net, const Config& config, const Size& size, const Options& options) {
  const RandomInputs inputs(config, size, options);
  std::vector<float> out(size_t(size.batch * size.tokens() * config.out_channels));
  std::vector<Row> parts(kPartNames.size());
  for (size_t i = 0; i < parts.size(); ++i) parts[i].part = kPartNames[i];
  Row step{"step", {}, 0};
  net.predict(inputs.images, out);  // warms up
  for (int run = 0; run < options.runs; ++run) {
    if (net.cuda() != nullptr) {
      step.ms.push_back(net.cuda()->time_step());
      const model::flux::CudaPartTimes times = net.cuda()->time_parts();
      for (size_t i = 0; i < parts.size(); ++i) parts[i].ms.push_back(times.ms[i]), parts[i].flops = times.flops[i];
      continue;
    }
    net.cpu()->reset_times();
    const auto start = std::chrono::steady_clock::now();
    net.predict(inputs.images, out);
    step.ms.push_back(1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i].ms.push_back(1e3 * net.cpu()->times().totals()[i].seconds);
      parts[i].flops = net.cpu()->times().totals()[i].flops;
    }
  }
  std::erase_if(parts, [](const Row& row) { return row.max() == 0; });
  for (const Row& row : parts) step.flops += row.flops;
  parts.push_back(std::move(step));
  return parts;
}

void report(const std::vector<Row>& rows, const Size& size, const Options& options, const Config& config,
            const std::string& device, int64_t weight_bytes) {
  const std::string shape = options.synthetic.empty() ? options.model : options.synthetic;
  const std::string policy = options.synthetic.empty() ? "as stored" : options.policy;
  const double whole = rows.back().median();
  if (!options.json)
    print(fmt::format(
        "{}, {} double and {} single blocks, {}, {} weights, {} x ({} + {}) tokens, {}\n"
        "{:<12} {:>12} {:>24} {:>7} {:>9}\n",
        printable(shape), config.n_double, config.n_single, policy, human_bytes(weight_bytes), size.batch,
        size.tokens(), options.text_tokens, device, "part", "median ms", "min .. max ms", "share", "TFLOP/s"));
  for (const Row& row : rows) {
    if (options.json)
      print_json({{"bench", "image"},
                  {"shape", shape},
                  {"policy", policy},
                  {"layers", {config.n_double, config.n_single}},
                  {"height", size.height},
                  {"width", size.width},
                  {"batch", size.batch},
                  {"tokens", size.tokens()},
                  {"text_tokens", options.text_tokens},
                  {"device", options.device},
                  {"on", device},
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
  return model::flux::random_checkpoint(options.synthetic, config, io::ImagePolicy::load(options.policy), options.seed,
                                        pool);
}

int bench(const Options& options) {
  const io::ImageCheckpoint checkpoint = [&] {
    ThreadPool pool(options.threads);
    return make_or_open(options, pool);
  }();
  const Config config = model::flux::read_config(checkpoint);
  std::vector<Size> sizes;
  for (const std::string& text : options.sizes) sizes.push_back(parse_size(text));
  const Size largest = *std::ranges::max_element(
      sizes, {}, [&](const Size& size) { return size.batch * (size.tokens() + options.text_tokens); });
  ImageNet net(checkpoint, options, options.gpu,
               {.images = largest.batch, .text_tokens = options.text_tokens, .image_tokens = largest.tokens()});
  const std::string device =
      net.cuda() != nullptr ? net.device_name() : fmt::format("{} threads, {}", options.threads, kernels::isa_name());
  for (const Size& size : sizes)
    report(measure(net, config, size, options), size, options, config, device,
           net.cuda() != nullptr ? net.cuda()->weight_bytes() : checkpoint.weight_bytes());
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
      "weights of a known shape. On a CUDA device times are those of a recorded step, the parts' of one in which every "
      "part waits for the one before.");
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
  command
      ->add_option("--policy", options->policy,
                   "layouts of the random matrices: a policy file, or one of " + io::image_policy_names() +
                       "; matrices of one kind have the same values in all blocks")
      ->needs(synthetic)
      ->capture_default_str()
      ->type_name("NAME|FILE");
  command
      ->add_option("--size", options->sizes,
                   "heights and widths in pixels, and the images in a step where they are several (together on a CUDA "
                   "device), e.g. 512x512,1024x1024x4")
      ->delimiter(',')
      ->check(CLI::Validator(
          [](std::string& text) {
            try {
              parse_size(text);
            } catch (const Error& error) {
              return std::string(error.what());
            }
            return std::string();
          },
          ""))
      ->capture_default_str()
      ->type_name("HxW[xB]");
  command->add_option("--text-tokens", options->text_tokens, "tokens of the prompt")
      ->check(integer_in(1, 65536))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--runs", options->runs, "timed repetitions; the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  add_seed(*command, options->seed, "start of the random numbers");
  add_gpu_choice(*command, options->gpu);
  add_common(*command, *options);
  return [options, command] {
    check_gpu(*command, *options);
    if (options->model.empty() && options->synthetic.empty())
      throw Error("nothing to measure: name a MODEL or give --synthetic SHAPE");
    return bench(*options);
  };
}

}  // namespace lacuna::cli
