// src/cli/image_calibrate.cc - `image calibrate`: statistics of the inputs of a diffusion transformer's linear layers.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "calibrate/image_statistics.h"
#include "cli/image.h"
#include "cli/image_inputs.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/say.h"
#include "io/image_checkpoint.h"
#include "io/image_policy.h"
#include "model/flux/net.h"

namespace lacuna::cli {
namespace {

using calibrate::ImageStatistics;
using model::flux::LinearInput;

struct Options : Common {
  std::string model, out;
  std::vector<std::string> inputs, second_moments;
  bool entropies = false;
  double memory_gib = 8;
  LoopOptions loop;
};

void check_patterns(const Options& options, const io::ImageCheckpoint& checkpoint) {
  for (const std::string& pattern : options.second_moments)
    if (std::none_of(checkpoint.tensors().begin(), checkpoint.tensors().end(), [&](const auto& named) {
          return named.second.dims.size() == 2 && io::matches_name(pattern, named.first);
        }))
      throw Error("--second-moments {}: {} has no matrix of that name", pattern, options.model);
}

/// Matrices that no token reached.
std::vector<std::string> unseen(const io::ImageCheckpoint& checkpoint, const ImageStatistics& statistics) {
  std::set<std::string, std::less<>> seen;
  for (const auto& [first, layer] : statistics.layers()) seen.insert(layer.weights.begin(), layer.weights.end());
  std::vector<std::string> out;
  for (const auto& [name, tensor] : checkpoint.tensors())
    if (tensor.dims.size() == 2 && !seen.contains(name)) out.push_back(name);
  return out;
}

int run(const Options& options, const CLI::App& command) {
  check_common(options);
  if (options.second_moments.empty()) refuse_given(command, {"--memory"}, "--second-moments");
  const auto start = std::chrono::steady_clock::now();
  const io::ImageCheckpoint checkpoint = io::ImageCheckpoint::open(options.model);
  check_output(options.out, options.inputs, checkpoint);
  check_patterns(options, checkpoint);
  ThreadPool pool(options.threads);
  model::flux::Net net(checkpoint, pool);
  std::vector<ImageInputs> inputs;
  int64_t runs = 0, images = 0;
  for (const std::string& path : options.inputs) {
    inputs.emplace_back(path, net.config(), options.loop, command);
    runs += inputs.back().runs(), images += inputs.back().images();
  }

  ImageStatistics statistics({options.second_moments, int64_t(options.memory_gib * double(int64_t{1} << 30))}, pool);
  Progress progress("Calibrating", runs * (options.entropies ? 2 : 1), "runs");
  const auto pass = [&](const model::flux::InputObserver& observer) {
    for (const ImageInputs& file : inputs)
      file.run(one_by_one([&](const model::flux::Inputs& one, std::span<float> out) {
        net.predict(one, out, nullptr, &observer);
        progress.add(1);
      }));
  };
  pass([&](const LinearInput& input) { statistics.add(input); });
  if (options.entropies) pass([&](const LinearInput& input) { statistics.count(input); });
  progress.hide();
  statistics.write(options.out, options.entropies,
                   {{"runs", std::to_string(runs)}, {"inputs", fmt::format("{}", fmt::join(options.inputs, ", "))}});

  const std::vector<std::string> left = unseen(checkpoint, statistics);
  if (!left.empty())
    spdlog::warn("{} of the matrices read no token and are not in {} ({} is the first); more prompts may reach them",
                 left.size(), options.out, printable(left.front()));
  int64_t matrices = 0, moments = 0;
  for (const auto& [first, layer] : statistics.layers()) {
    matrices += int64_t(layer.weights.size());
    moments += layer.moment ? int64_t(layer.weights.size()) : 0;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.json) {
    print_json({{"path", options.out},
                {"images", images},
                {"runs", runs},
                {"matrices", matrices},
                {"unseen", left},
                {"entropies", options.entropies},
                {"second_moments", moments},
                {"second_moment_bytes", statistics.moment_bytes()},
                {"seconds", seconds},
                {"peak_memory_bytes", peak_memory_bytes()}});
    return 0;
  }
  print(fmt::format("{}: norms{} of the inputs of {} matrices{}, from {} images, {} runs of the net\n", options.out,
                    options.entropies ? " and entropies" : "", matrices,
                    moments > 0 ? fmt::format(", second moments of {}", moments) : "", images, runs));
  say("{:.1f} s, peak memory {}\n", seconds, human_bytes(peak_memory_bytes()));
  return 0;
}

}  // namespace

Action add_image_calibrate(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "calibrate",
      "Statistics of the inputs of a FLUX.1 transformer's linear layers, for the masks of `image compress`: runs the "
      "net over saved latents and embeddings and writes each input's L2 norm over all tokens, images and steps.");
  command
      ->add_option("MODEL", options->model,
                   "the original weights: a folder of diffusers, a .safetensors file, or a GGUF file")
      ->required();
  command->add_option("--inputs", options->inputs, std::string(kImageInputsHelp) + "; may be given several times")
      ->required()
      ->allow_extra_args(false)
      ->type_name("FILE");
  command->add_option("-o,--out", options->out, "the .safetensors file to write; it appears when it is complete")
      ->required()
      ->type_name("FILE");
  command->add_flag("--entropies", options->entropies,
                    "also the entropies that --mask e-sparse reads; runs the net over all inputs twice");
  command
      ->add_option("--second-moments", options->second_moments,
                   "also X^T X of the matrices of this name, which --mask awp reads; \"*\" is any run of characters "
                   "without a dot; may be given several times. A matrix of K inputs takes 4 K (K + 1) bytes of memory "
                   "and 4 K^2 of the file")
      ->allow_extra_args(false)
      ->type_name("NAME");
  command
      ->add_option("--memory", options->memory_gib, "the most that second moments may take, in GiB; more is an error")
      ->check(number_in(0, 1e6, true))
      ->capture_default_str()
      ->type_name("GIB");
  add_loop(*command, options->loop);
  add_common(*command, *options);
  return [options, command] { return run(*options, *command); };
}

}  // namespace lacuna::cli
