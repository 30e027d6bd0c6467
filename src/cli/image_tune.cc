// src/cli/image_tune.cc - `image tune`: which plans of the wgmma kernel are fastest on this card, for the other `image`
// commands to use.
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>

#include "calibrate/cuda_profile.h"
#include "cli/command.h"
#include "cli/image.h"
#include "cli/image_case.h"
#include "cli/profile.h"
#include "core/error.h"
#include "core/progress.h"
#include "eval/tensor_core_tune.h"
#include "io/image_checkpoint.h"
#include "model/flux/config.h"
#include "model/flux/cuda_net.h"

namespace lacuna::cli {
namespace {

using cuda::TensorCoreProduct;

struct Options : Common {
  CaseOptions of;
  std::vector<std::string> policies = {"bf16"};
  std::string output;
  bool quick = false, explain = false;
  GpuFlags gpu;
};

/// Products of all sizes that a plan may be measured for.
std::set<TensorCoreProduct> planned_products(const Options& options, cuda::Device& device, ThreadPool& pool) {
  const size_t nets = options.of.synthetic.empty() ? 1 : options.policies.size();
  std::set<TensorCoreProduct> out;
  for (size_t i = 0; i < nets; ++i) {
    const io::ImageCheckpoint checkpoint = open_case(options.of, options.policies[i], pool);
    model::flux::CudaNet net(checkpoint, pool, device, options.of.largest());
    for (const StepSize& size : options.of.steps()) {
      const RandomStep step(net.config(), size, options.of);
      std::vector<float> sample(size_t(size.batch * size.tokens() * net.config().out_channels));
      net.predict(step.images, sample);
      out.merge(net.time_parts().planned);
    }
  }
  return out;
}

void print_times(const Options& options, const eval::ProductTimes& times, const std::string& path,
                 const cuda::DeviceInfo& device) {
  const cuda::TensorCoreTuning tuning = times.tuning();
  if (options.json) {
    Json row = calibrate::product_json(tuning);
    row["default"] = calibrate::plan_json(times.plans.front().plan);
    row["relative_error"] = times.error;
    if (options.explain) {
      row["measured"] = Json::array();
      for (const eval::PlanTimes& plan : times.plans)
        row["measured"].push_back({{"plan", calibrate::plan_json(plan.plan)},
                                   {"median_us", eval::spread_of(plan.us).median},
                                   {"quartiles_us", eval::spread_of(plan.us).quartiles},
                                   {"rounds", plan.us.size()}});
    }
    row["gpu"] = device.name;
    row["driver"] = device.driver;
    row["path"] = path;
    return print_json(row);
  }
  print(fmt::format("{:<44} {:>10.1f} {:>10.1f} {:>7.3f}x  {}{}\n", describe(times.product), tuning.standard_us,
                    tuning.tuned_us, tuning.standard_us / tuning.tuned_us, describe(tuning.plan),
                    times.chosen == 0 ? " (default)" : ""));
  if (!options.explain) return;
  for (const eval::PlanTimes& plan : times.plans) {
    const eval::Spread spread = eval::spread_of(plan.us);
    print(fmt::format("  {:<42} {:>10.1f}, {:.1f} between the quartiles of {} rounds\n", describe(plan.plan),
                      spread.median, spread.quartiles, plan.us.size()));
  }
}

int tune(const Options& options) {
  if (options.device != "cuda") throw Error("image tune measures kernels of CUDA devices: give --device cuda");
  check_case(options.of);
  ThreadPool pool(options.threads);
  cuda::Device device(options.gpu.options());
  if (device.info().major != 9)
    throw Error("image tune measures plans of the wgmma kernel, which {} does not run: there is nothing to tune",
                device.info().name);
  const calibrate::CudaMachine here = this_machine(device.info());
  const std::string path = options.output.empty() ? profile_path(here) : options.output;
  if (path.empty())
    throw Error(
        "no folder to keep the profile in: LACUNA_CACHE, XDG_CACHE_HOME and HOME are not set; name a file with -o");
  calibrate::CudaProfile profile = profile_to_add_to(calibrate::CudaProfile{.machine = here}, !options.output.empty(),
                                                     [&] { return calibrate::load_cuda_profile(path, here); });
  const auto start = std::chrono::steady_clock::now();
  const std::set<TensorCoreProduct> products = planned_products(options, device, pool);
  if (products.empty())
    throw Error("no product of these steps runs by a plan of the wgmma kernel: there is nothing to tune");

  eval::TensorCoreTuneOptions wanted;
  if (options.quick) wanted.rounds = 5;
  if (!options.json)
    print(fmt::format("{}; us of a product alone\n{:<44} {:>10} {:>10} {:>8}  {}\n", here.gpu,
                      "layout tokens x outputs x inputs", "default", "chosen", "", "plan"));
  Progress bar("Measuring", int64_t(products.size()), "products");
  std::optional<eval::RandomWeights> weights;  // of products that differ in tokens alone
  int64_t faster = 0;
  for (const TensorCoreProduct& product : products) {
    const layout::Layout& layout = layout_of(product.operation);
    const layout::Shape shape{product.N * std::max(product.groups, 1), product.K};
    if (!weights || weights->layout != &layout || weights->shape != shape) {
      weights.reset();  // no two in memory at once
      weights = eval::random_weights(layout, shape, options.of.seed + 1, pool);
    }
    eval::TensorCoreCase of(device, *weights,
                            {.M = product.M, .N = product.N, .K = product.K, .groups = product.groups},
                            options.of.seed + 2, pool);
    const eval::ProductTimes times = eval::tune_tensor_core(of, product.accumulate, wanted);
    faster += times.chosen != 0;
    profile.tensor_core.set(times.tuning());
    calibrate::save_cuda_profile(path, profile);  // what was measured stays when this ends early
    bar.hide();
    print_times(options, times, path, device.info());
    bar.add(1);
  }
  bar.hide();
  if (!options.json)
    print(fmt::format(
        "{}: {} products measured in {:.1f} s, {} of them faster by another plan than the default; {} in "
        "all\n",
        path, products.size(), std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), faster,
        profile.tensor_core.tunings().size()));
  return 0;
}

}  // namespace

Action add_image_tune(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "tune",
      "Measure which shape of blocks of the wgmma kernel is fastest on this card (compute capability 9.0) for every "
      "product of a net's steps: of a model, or of random weights of a known shape. What is found is stored in the "
      "card's profile in the cache folder, which `image step`, `denoise`, `bench` and `linear` use from then on; "
      "products add up in it. Nothing else should run meanwhile.");
  add_case(*command, options->of);
  add_case_policies(*command, options->policies);
  command
      ->add_option("-o,--output", options->output,
                   "profile to write or to add to; default: in the cache folder (LACUNA_CACHE, else "
                   "XDG_CACHE_HOME/lacuna, else ~/.cache/lacuna)")
      ->type_name("FILE");
  command->add_flag("--quick", options->quick, "a third of the rounds: small differences stay unseen");
  command->add_flag("--explain", options->explain, "print what every plan took, not only the chosen one");
  add_gpu_choice(*command, options->gpu);
  add_common(*command, *options);
  return [options, command] {
    check_gpu(*command, *options);
    return tune(*options);
  };
}

}  // namespace lacuna::cli
