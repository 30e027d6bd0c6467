// src/cli/tune.cc - `tune`: how this machine multiplies a model's weights fastest, for run and bench to use.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <chrono>

#include "calibrate/profile.h"
#include "calibrate/tuner.h"
#include "cli/cuda_tune.h"
#include "cli/profile.h"
#include "core/error.h"
#include "io/checkpoint.h"

namespace lacuna::cli {
namespace {

struct Options : Common {
  std::string model, output;
  std::vector<double> levels = {25, 40, 50, 65};
  double seconds = calibrate::TuneOptions{}.seconds;
  bool quick = false, explain = false;
  std::string thresholds;
  GpuFlags gpu;
};

std::string row(const std::string& name, const calibrate::PlanTimes& times) {
  std::string out = fmt::format("  {:<74}{:>9.4f}", name, times.dense_ms);
  for (size_t i = 1; i < times.sparse_ms.size(); ++i) out += fmt::format("{:>9.4f}", times.sparse_ms[i]);
  return out + "\n";
}

std::string table(const calibrate::GroupTuning& group, bool explain) {
  std::string out = fmt::format("{}  {}, {}\n", printable(group.name), group.key, human_bytes(group.bytes));
  std::string head = fmt::format("  {:<74}{:>9}", "ms of one token", "dense");
  for (size_t i = 1; i < group.levels.size(); ++i)
    head += fmt::format("{:>9}", fmt::format("{:.4g}%", 100 * group.levels[i]));
  out += head + "\n" + row("default: " + kernels::describe(group.standard().plan), group.standard());
  if (&group.chosen() != &group.standard())
    out += row("chosen:  " + kernels::describe(group.chosen().plan), group.chosen());
  if (explain)
    for (size_t i = 1; i < group.measured.size(); ++i)
      out += row("         " + kernels::describe(group.measured[i].plan), group.measured[i]);
  const double from = group.plan.dense_below;
  if (&group.chosen() == &group.standard()) out += "  no plan is faster than the default by more than the noise\n";
  return out + (from >= 1 ? "  skipping never pays: this input runs dense\n\n"
                          : fmt::format("  skipping pays from {:.1f}% of the inputs on\n\n", 100 * from));
}

Json plan_json(const kernels::Plan& plan) {
  return {{"split", kernels::name_of(plan.split)},
          {"chunk", plan.chunk},
          {"prefetch", plan.prefetch},
          {"tile_rows", plan.tile_rows}};
}

Json times_json(const calibrate::PlanTimes& times) {
  return {{"plan", plan_json(times.plan)},
          {"dense_ms", times.dense_ms},
          {"sparse_ms", times.sparse_ms},
          {"rounds", times.rounds}};
}

std::vector<double> shares(const Options& options) {
  std::vector<double> out;
  for (const double level : options.levels) out.push_back(level < 1 ? level : level / 100);
  return out;
}

int tune(const Options& options) {
  check_common(options);
  const calibrate::Machine here = this_machine(options.threads);
  const std::string path = options.output.empty() ? profile_path(here) : options.output;
  if (path.empty())
    throw Error(
        "no folder to keep the profile in: LACUNA_CACHE, XDG_CACHE_HOME and HOME are not set; name a file with -o");
  calibrate::TuneOptions wanted;
  wanted.levels = shares(options);
  wanted.seconds = options.quick ? options.seconds / 4 : options.seconds;

  calibrate::Profile profile = profile_to_add_to(calibrate::Profile{here, {}}, !options.output.empty(),
                                                 [&] { return calibrate::load_profile(path, here); });
  const auto start = std::chrono::steady_clock::now();
  const io::Checkpoint checkpoint = open_weights(options.model, options);
  ThreadPool pool(options.threads);
  const std::vector<calibrate::GroupTuning> groups = calibrate::tune(checkpoint, pool, wanted);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  profile.merge(groups);
  calibrate::save_profile(path, profile);

  for (const calibrate::GroupTuning& group : groups) {
    if (!options.json) {
      print(table(group, options.explain));
      continue;
    }
    Json out = {{"group", group.name},
                {"key", group.key},
                {"bytes", group.bytes},
                {"levels", group.levels},
                {"plan", plan_json(group.plan)},
                {"dense_below", group.plan.dense_below},
                {"noise", group.noise},
                {"default", times_json(group.standard())},
                {"chosen", times_json(group.chosen())}};
    if (options.explain) {
      Json all = Json::array();
      for (const calibrate::PlanTimes& times : group.measured) all.push_back(times_json(times));
      out["measured"] = std::move(all);
    }
    out["path"] = path;
    out["threads"] = options.threads;
    out["seconds"] = seconds;
    print_json(out);
  }
  if (!options.json)
    print(fmt::format("{}: {} groups measured in {:.1f} s with {} threads, {} in all\n", path, groups.size(), seconds,
                      options.threads, profile.groups.size()));
  return 0;
}

}  // namespace

Action add_tune(CLI::App& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand(
      "tune",
      "Measure how this machine multiplies a model's zigzag weights fastest: how the work is shared out, how many "
      "columns "
      "at a time, how far ahead they are prefetched, how they are tiled, and from which sparsity on skipping inputs "
      "pays; on cuda group-sparse weights (gs2 to gs16) too. "
      "The "
      "profile is stored in the cache folder and `run` and `bench` use it from then on, with as many threads as it was "
      "measured with, or on the same card; models add up in it. Nothing else should run meanwhile.");
  command
      ->add_option("MODEL", options->model,
                   "a .gguf file with zigzag weights (`lacuna quantize --layout zz4_k`) or, on cuda, group-sparse ones")
      ->required();
  command
      ->add_option("-o,--output", options->output,
                   "profile to write or to add to; default: in the cache folder (LACUNA_CACHE, else "
                   "XDG_CACHE_HOME/lacuna, else ~/.cache/lacuna)")
      ->type_name("FILE");
  CLI::Option* levels =
      command
          ->add_option(
              "--levels", options->levels,
              "activation sparsities to measure, in percent, ascending; cuda: by default those of the thresholds")
          ->delimiter(',')
          ->capture_default_str()
          ->type_name("LIST");
  command
      ->add_option("--thresholds", options->thresholds,
                   "cuda only: thresholds that say which inputs are left out; default: beside the model or in it. "
                   "Without any, only dense tokens are tuned")
      ->type_name("FILE");
  CLI::Option* seconds =
      command->add_option("--seconds", options->seconds, "how long to measure each distinct group of weights")
          ->check(number_in(0.01, 3600))
          ->capture_default_str()
          ->type_name("S");
  command->add_flag("--quick", options->quick, "a quarter of the time: small differences stay unseen");
  command->add_flag("--explain", options->explain, "print what every plan took, not only the chosen one");
  add_gpu_choice(*command, options->gpu);
  add_common(*command, *options);
  return [=] {
    check_gpu(*command, *options);
    if (options->device != "cuda") {
      if (!options->thresholds.empty()) throw Error("--thresholds is of --device cuda; leave it out here");
      return tune(*options);
    }
    for (const auto& [flag, given] :
         {std::pair{"--seconds", seconds->count() > 0}, {"--quick", options->quick}, {"--explain", options->explain}})
      if (given) throw Error("{} is of --device cpu; leave it out with cuda", flag);
    return run_cuda_tune({.common = *options,
                          .model = options->model,
                          .output = options->output,
                          .levels = levels->count() > 0 ? shares(*options) : std::vector<double>{},
                          .thresholds = options->thresholds,
                          .gpu = options->gpu});
  };
}

}  // namespace lacuna::cli
