// src/cli/image_calibrate.cc - `image calibrate`: statistics of the inputs of a diffusion transformer's linear layers.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "calibrate/cuda_image_statistics.h"
#include "calibrate/image_statistics.h"
#include "cli/image.h"
#include "cli/image_inputs.h"
#include "cli/image_net.h"
#include "core/error.h"
#include "core/progress.h"
#include "core/say.h"
#include "io/image_checkpoint.h"
#include "io/image_policy.h"
#include "model/flux/config.h"
#include "model/flux/cuda_net.h"
#include "model/flux/net.h"

namespace lacuna::cli {
namespace {

using Clock = std::chrono::steady_clock;
using calibrate::InputStatistics;
using model::flux::CudaInputObserver;
using model::flux::InputObserver;
using model::flux::Inputs;

struct Options : Common {
  std::string model, out;
  std::vector<std::string> inputs, second_moments;
  bool entropies = false;
  double memory_gib = 8;
  LoopOptions loop;
  GpuFlags gpu;
};

void check_patterns(const Options& options, const io::ImageCheckpoint& checkpoint) {
  for (const std::string& pattern : options.second_moments)
    if (std::none_of(checkpoint.tensors().begin(), checkpoint.tensors().end(), [&](const auto& named) {
          return named.second.dims.size() == 2 && io::matches_name(pattern, named.first);
        }))
      throw Error("--second-moments {}: {} has no matrix of that name", pattern, options.model);
}

/// Matrices that no token reached.
std::vector<std::string> unseen(const io::ImageCheckpoint& checkpoint, std::span<const InputStatistics> statistics) {
  std::set<std::string, std::less<>> seen;
  for (const InputStatistics& input : statistics) seen.insert(input.weights.begin(), input.weights.end());
  std::vector<std::string> out;
  for (const auto& [name, tensor] : checkpoint.tensors())
    if (tensor.dims.size() == 2 && !seen.contains(name)) out.push_back(name);
  return out;
}

/// The largest step of one image.
model::flux::CudaNetOptions largest_step(const std::vector<ImageInputs>& inputs) {
  const auto tokens = [](const ImageInputs& file) { return file.text_tokens() + file.image_tokens(); };
  const auto most = std::ranges::max_element(inputs, {}, tokens);
  return {.images = 1, .text_tokens = most->text_tokens(), .image_tokens = most->image_tokens()};
}

/// Runs of the net, each of one image.
int64_t runs_of(const std::vector<ImageInputs>& inputs) {
  int64_t out = 0;
  for (const ImageInputs& file : inputs) out += file.runs();
  return out;
}

/// Both passes over the inputs, or the first. predict(image, out, observer): a run of the net.
template <class Observer, class Statistics, class Predict>
void gather(const std::vector<ImageInputs>& inputs, bool entropies, Statistics& statistics, const Predict& predict) {
  Progress progress("Calibrating", runs_of(inputs) * (entropies ? 2 : 1), "runs");
  const auto pass = [&](const Observer& observer) {
    for (const ImageInputs& file : inputs)
      file.run(one_by_one([&](const Inputs& image, std::span<float> out) {
        predict(image, out, observer);
        progress.add(1);
      }));
  };
  pass([&](const auto& input) { statistics.add(input); });
  if (entropies) pass([&](const auto& input) { statistics.count(input); });
}

/// Writes the file and says what it holds.
void write(const Options& options, const io::ImageCheckpoint& checkpoint, const std::vector<ImageInputs>& inputs,
           std::span<const InputStatistics> statistics, int64_t moment_bytes, Clock::time_point start) {
  const int64_t runs = runs_of(inputs);
  calibrate::write_image_statistics(
      options.out, statistics,
      {{"runs", std::to_string(runs)}, {"inputs", fmt::format("{}", fmt::join(options.inputs, ", "))}});
  const std::vector<std::string> left = unseen(checkpoint, statistics);
  if (!left.empty())
    spdlog::warn("{} of the matrices read no token and are not in {} ({} is the first); more prompts may reach them",
                 left.size(), options.out, printable(left.front()));
  int64_t matrices = 0, moments = 0, images = 0;
  for (const InputStatistics& input : statistics) {
    matrices += int64_t(input.weights.size());
    moments += input.moment ? int64_t(input.weights.size()) : 0;
  }
  for (const ImageInputs& file : inputs) images += file.images();
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (options.json) {
    print_json({{"path", options.out},
                {"images", images},
                {"runs", runs},
                {"device", options.device},
                {"matrices", matrices},
                {"unseen", left},
                {"entropies", options.entropies},
                {"second_moments", moments},
                {"second_moment_bytes", moment_bytes},
                {"seconds", seconds},
                {"peak_memory_bytes", peak_memory_bytes()}});
    return;
  }
  print(fmt::format("{}: norms{} of the inputs of {} matrices{}, from {} images, {} runs of the net\n", options.out,
                    options.entropies ? " and entropies" : "", matrices,
                    moments > 0 ? fmt::format(", second moments of {}", moments) : "", images, runs));
  say("{:.1f} s, peak memory {}\n", seconds, human_bytes(peak_memory_bytes()));
}

int run(const Options& options, const CLI::App& command) {
  check_gpu(command, options);
  if (options.second_moments.empty()) refuse_given(command, {"--memory"}, "--second-moments");
  const auto start = Clock::now();
  const io::ImageCheckpoint checkpoint = io::ImageCheckpoint::open(options.model);
  std::vector<std::string> read = options.inputs;
  read.push_back(options.loop.schedule);
  check_output(options.out, std::move(read), checkpoint);
  check_patterns(options, checkpoint);
  std::vector<ImageInputs> inputs;
  for (const std::string& path : options.inputs)
    inputs.emplace_back(path, model::flux::read_config(checkpoint), options.loop, command);
  refuse_unused(command, inputs);
  ImageNet net(checkpoint, options, options.gpu, largest_step(inputs), {.path = {}, .none = true});
  const calibrate::ImageStatisticsOptions chosen{options.second_moments,
                                                 int64_t(options.memory_gib * double(int64_t{1} << 30))};
  if (net.cuda() != nullptr) {
    calibrate::CudaImageStatistics statistics(chosen, options.entropies, *net.device());
    gather<CudaInputObserver>(inputs, options.entropies, statistics,
                              [&](const Inputs& image, std::span<float> out, const CudaInputObserver& observer) {
                                net.cuda()->predict({&image, 1}, out, nullptr, &observer);
                              });
    write(options, checkpoint, inputs, statistics.results(), statistics.moment_bytes(), start);
    return 0;
  }
  calibrate::ImageStatistics statistics(chosen, net.pool());
  gather<InputObserver>(inputs, options.entropies, statistics,
                        [&](const Inputs& image, std::span<float> out, const InputObserver& observer) {
                          net.cpu()->predict(image, out, nullptr, &observer);
                        });
  write(options, checkpoint, inputs, statistics.results(options.entropies), statistics.moment_bytes(), start);
  return 0;
}

}  // namespace

Action add_image_calibrate(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "calibrate",
      "Statistics of the inputs of a FLUX.1 transformer's linear layers, for the masks of `image compress`: runs the "
      "net over saved latents and embeddings and writes each input's L2 norm over all tokens, images and steps. A CUDA "
      "device gathers the inputs as it computes with them, rounded to bf16.");
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
      ->add_option("--memory", options->memory_gib,
                   "the most that second moments may take, in GiB, on a CUDA device of its memory; more is an error")
      ->check(number_in(0, 1e6, true))
      ->capture_default_str()
      ->type_name("GIB");
  add_loop(*command, options->loop);
  add_gpu_choice(*command, options->gpu);
  add_common(*command, *options);
  return [options, command] { return run(*options, *command); };
}

}  // namespace lacuna::cli
