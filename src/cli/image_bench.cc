// src/cli/image_bench.cc - `image bench`: time of one denoising step, by part.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>

#include "cli/command.h"
#include "cli/image.h"
#include "cli/image_case.h"
#include "cli/image_net.h"
#include "cli/profile.h"
#include "core/error.h"
#include "io/image_checkpoint.h"

namespace lacuna::cli {
namespace {

using model::flux::Config;
using model::flux::kPartNames;

struct Options : Common {
  CaseOptions of;
  std::string policy = "bf16";
  bool explain = false;
  int runs = 3;
  GpuFlags gpu;
  ProfileFlags profile;
};

struct Row {
  std::string_view part;
  std::vector<double> ms;
  double flops = 0;
  std::vector<std::string> kernels;  // of its products

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

struct Measured {
  std::vector<Row> rows;            // the parts that took time, then the whole step
  std::optional<double> deviation;  // of a CUDA device's results (CudaNet::deviation)
};

/// Kernels differ in roundings to bf16 and E4M3 and in how many bits sums of E4M3 keep; a tile that is wrong differs
/// by about the size of its tokens' results. Experts that are chosen otherwise change a token's results too.
constexpr double kMostDeviation = 0.1, kMostDeviationOfExperts = 0.3;

Measured measure(ImageNet& net, const Config& config, const StepSize& size, const Options& options) {
  const RandomStep inputs(config, size, options.of);
  std::vector<float> out(size_t(size.batch * size.tokens() * config.out_channels));
  std::vector<Row> parts(kPartNames.size());
  for (size_t i = 0; i < parts.size(); ++i) parts[i].part = kPartNames[i];
  Row step{"step", {}, 0, {}};
  net.predict(inputs.images, out);  // warms up
  Measured measured;
  if (net.cuda() != nullptr) {
    measured.deviation = net.cuda()->deviation();
    if (!(*measured.deviation <= (config.moe.n_experts > 0 ? kMostDeviationOfExperts : kMostDeviation)))
      throw Error(
          "{} x {} tokens: results differ by {:.3f} of their size between the kernels of this card and those of any "
          "card; they are wrong, and no time is worth measuring",
          size.batch, size.tokens(), *measured.deviation);
  }
  for (int run = 0; run < options.runs; ++run) {
    if (net.cuda() != nullptr) {
      step.ms.push_back(net.cuda()->time_step());
      const model::flux::CudaPartTimes times = net.cuda()->time_parts();
      for (size_t i = 0; i < parts.size(); ++i) {
        parts[i].ms.push_back(times.ms[i]);
        parts[i].flops = times.flops[i], parts[i].kernels = times.kernels[i];
      }
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
  measured.rows = std::move(parts);
  return measured;
}

void report(const Measured& measured, const StepSize& size, const Options& options, const Config& config,
            const std::string& device, int64_t weight_bytes, const std::string& plan_source) {
  const std::string shape = options.of.synthetic.empty() ? options.of.model : options.of.synthetic;
  const std::string policy = options.of.synthetic.empty() ? "as stored" : options.policy;
  const double whole = measured.rows.back().median();
  if (!options.json)
    print(fmt::format(
        "{}, {} double and {} single blocks, {}, {} weights, {} x ({} + {}) tokens, {}\n"
        "{:<12} {:>12} {:>24} {:>7} {:>9}\n",
        printable(shape), config.n_double, config.n_single, policy, human_bytes(weight_bytes), size.batch,
        size.tokens(), options.of.text_tokens, device, "part", "median ms", "min .. max ms", "share", "TFLOP/s"));
  for (const Row& row : measured.rows) {
    if (options.json) {
      Json line = {{"bench", "image"},
                   {"shape", shape},
                   {"policy", policy},
                   {"layers", {config.n_double, config.n_single}},
                   {"height", size.height},
                   {"width", size.width},
                   {"batch", size.batch},
                   {"tokens", size.tokens()},
                   {"text_tokens", options.of.text_tokens},
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
                   {"weight_bytes", weight_bytes}};
      if (measured.deviation) line["deviation"] = *measured.deviation;
      if (measured.deviation) line["profile"] = plan_source;
      if (options.explain) line["kernels"] = row.kernels;
      print_json(line);
    } else {
      print(fmt::format("{:<12} {:>12.3f} {:>24} {:>6.1f}% {:>9.3f}\n", row.part, row.median(),
                        fmt::format("{:.3f} .. {:.3f}", row.min(), row.max()), 100 * row.median() / whole,
                        row.tflops()));
      if (options.explain)
        for (const std::string& kernel : row.kernels) print(fmt::format("  {}\n", kernel));
    }
  }
}

int bench(const Options& options) {
  const io::ImageCheckpoint checkpoint = [&] {
    ThreadPool pool(options.threads);
    return open_case(options.of, options.policy, pool);
  }();
  const Config config = model::flux::read_config(checkpoint);
  ImageNet net(checkpoint, options, options.gpu, options.of.largest(), options.profile);
  const std::string device =
      net.cuda() != nullptr ? net.device_name() : fmt::format("{} threads, {}", options.threads, kernels::isa_name());
  if (options.explain && !options.json) print(fmt::format("profile: {}\n", printable(net.plan_source())));
  for (const StepSize& size : options.of.steps())
    report(measure(net, config, size, options), size, options, config, device,
           net.cuda() != nullptr ? net.cuda()->weight_bytes() : checkpoint.weight_bytes(), net.plan_source());
  return 0;
}

}  // namespace

Action add_image_bench(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "bench",
      "Time of one denoising step by part: attention, each kind of linear layer, the rest. On a model, or on random "
      "weights of a known shape. On a CUDA device times are those of a recorded step, the parts' of one in which every "
      "part waits for the one before; results are first compared with those of kernels that any card runs.");
  add_case(*command, options->of);
  add_case_policy(*command, options->policy);
  command->add_flag(
      "--explain", options->explain,
      "also the kernels of each part's products (outputs x inputs: kernel, and where its plan comes from), "
      "on a CUDA device");
  command->add_option("--runs", options->runs, "timed repetitions; the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  add_gpu_choice(*command, options->gpu);
  add_card_profile(*command, options->profile);
  add_common(*command, *options);
  return [options, command] {
    check_gpu(*command, *options);
    if (options->device != "cuda") refuse_given(*command, {"--explain", "--profile", "--no-profile"}, "--device cuda");
    check_case(options->of);
    return bench(*options);
  };
}

}  // namespace lacuna::cli
