// src/cli/image_linear.cc - `image linear`: time of linear layers on tensor cores (QuaSpa, Table 1 and Figure 8).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>

#include "cli/command.h"
#include "cli/image.h"
#include "cli/profile.h"
#include "core/error.h"
#include "eval/tensor_core_case.h"
#include "kernels/cuda/tensor_core.h"
#include "kernels/cuda/tensor_core_table.h"
#include "layout/layout.h"

namespace lacuna::cli {
namespace {

using cuda::Accumulate;
using cuda::WriteBack;
using eval::TensorCoreCase;
using eval::TensorCoreProblem;

/// QuaSpa's Table 1.
constexpr TensorCoreProblem kPaper[] = {
    {4096, 3072, 3072},   {4096, 12288, 3072}, {4096, 3072, 12288},  {6144, 3072, 3072},
    {6144, 12288, 3072},  {6144, 3072, 12288}, {16384, 3072, 3072},  {16384, 12288, 3072},
    {16384, 3072, 12288}, {18432, 3072, 3072}, {18432, 12288, 3072}, {18432, 3072, 12288},
};
constexpr std::array kAccumulates = {std::pair{"fast", Accumulate::fast}, std::pair{"full", Accumulate::full}};
constexpr std::array kWriteBacks = {std::pair{"staged", WriteBack::staged}, std::pair{"direct", WriteBack::direct},
                                    std::pair{"separate", WriteBack::separate}};
constexpr std::array kKernels = {std::pair{"best", cuda::TensorCoreKernel::best},
                                 std::pair{"mma", cuda::TensorCoreKernel::mma},
                                 std::pair{"wgmma", cuda::TensorCoreKernel::wgmma}};

struct Options : Common {
  int gpu = 0;
  std::vector<std::string> shapes, layouts = {"f8", "nm24_f8"}, accumulates = {"fast"}, write_backs = {"staged"};
  std::string kernel = "best";
  bool plans = false, skewed = false;
  int groups = 0;
  int runs = 15;
  uint64_t seed = 0;
  ProfileFlags profile;
};

template <class Table>
auto named(const Table& table, const std::string& name) {
  for (const auto& [key, value] : table)
    if (name == key) return value;
  throw Error("no {} here", name);
}

TensorCoreProblem parse(const std::string& text) {
  TensorCoreProblem out;
  char left = 0;
  if (std::sscanf(text.c_str(), "%ldx%ldx%ld%c", &out.M, &out.N, &out.K, &left) != 3 || out.M < 1 || out.N < 1 ||
      out.K < 1 || std::max({out.M, out.N, out.K}) > 1 << 20)
    throw Error("--shape {}: expected MxNxK (tokens, outputs, inputs), each from 1 to 1048576", text);
  return out;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void report(const Options& options, const TensorCorePlans& measured, TensorCoreCase& problem,
            const TensorCoreProblem& shape, const layout::Layout& layout) {
  const cuda::DeviceInfo& device = problem.device().info();
  const std::vector<double> quantization = problem.time_quantization(options.runs);
  const bool eight_bits = cuda::operation_of(layout).eight_bits;
  for (const std::string& accumulate : options.accumulates) {
    if (!eight_bits && accumulate == "full") continue;  // bf16 has one kind of sums
    for (const std::string& write_back : options.write_backs) {
      cuda::TensorCoreArgs args = problem.arguments(named(kAccumulates, accumulate), named(kWriteBacks, write_back),
                                                    named(kKernels, options.kernel));
      std::vector<const cuda::TensorCorePlan*> plans = {nullptr};
      if (options.plans && write_back == "staged" && options.kernel != "mma") {
        plans.clear();
        for (const cuda::TensorCorePlan& plan : tensor_core_plans(cuda::operation_of(layout), args.accumulate))
          plans.push_back(&plan);
        if (plans.empty()) throw Error("--plans: this build has no wgmma kernel; build it for compute capability 9.0");
      }
      for (const cuda::TensorCorePlan* plan : plans) {
        args.plan = plan != nullptr ? plan : find_plan(measured.plans, device, args);
        const std::string kernel =
            plan != nullptr ? explain_tensor_core(device, args) : explain_tensor_core(device, args, measured.plans);
        const double error = problem.error(args);
        if (!(error < eval::kMostTensorCoreError))
          throw Error("{} {} x {} x {}: the result is off by {:.2e} of itself; the kernel is wrong here", layout.name,
                      shape.M, shape.N, shape.K, error);
        const std::vector<double> ms = problem.time_product(args, options.runs);
        const double tflops = 2e-9 * double(shape.M) * double(shape.N) * double(shape.K) / median(ms);
        if (options.json)
          print_json({{"bench", "image linear"},
                      {"layout", layout.name},
                      {"M", shape.M},
                      {"N", shape.N},
                      {"K", shape.K},
                      {"groups", options.groups},
                      {"skewed", options.skewed},
                      {"accumulate", accumulate},
                      {"write_back", write_back},
                      {"kernel", kernel},
                      {"median_ms", median(ms)},
                      {"min_ms", *std::ranges::min_element(ms)},
                      {"max_ms", *std::ranges::max_element(ms)},
                      {"quantize_ms", quantization.empty() ? Json() : Json(median(quantization))},
                      {"tflops", tflops},
                      {"relative_error", error},
                      {"runs", options.runs},
                      {"profile", measured.source},
                      {"device", "cuda"},
                      {"gpu", device.name},
                      {"driver", device.driver}});
        else
          print(fmt::format(
              "{:<10} {:>6} {:>6} {:>6} {:>9.4f} {:>19} {:>9} {:>8.0f} {:>9.1e}  {}\n", layout.name, shape.M, shape.N,
              shape.K, median(ms),
              fmt::format("{:.4f} .. {:.4f}", *std::ranges::min_element(ms), *std::ranges::max_element(ms)),
              quantization.empty() ? "-" : fmt::format("{:.4f}", median(quantization)), tflops, error, kernel));
      }
    }
  }
}

int run(const Options& options) {
  if (options.device != "cuda") throw Error("image linear measures kernels of CUDA devices: give --device cuda");
  std::vector<TensorCoreProblem> problems(std::begin(kPaper), std::end(kPaper));
  if (!options.shapes.empty()) problems.clear();
  for (const std::string& text : options.shapes) problems.push_back(parse(text));
  for (TensorCoreProblem& problem : problems) {
    problem.groups = options.groups, problem.skewed = options.skewed;
    if (options.groups > 0 && problem.N % cuda::kTileRowsOfWeights != 0)
      throw Error("--groups: {} outputs of a group; they must be a multiple of {}", problem.N,
                  cuda::kTileRowsOfWeights);
  }
  if (options.skewed && options.groups == 0) throw Error("--skewed needs --groups");
  std::vector<const layout::Layout*> layouts;
  for (const std::string& name : options.layouts) {
    layouts.push_back(&layout::get(layout_named("--layout", name)));
    cuda::operation_of(*layouts.back());
  }
  if (options.accumulates == std::vector<std::string>{"full"})
    for (const layout::Layout* layout : layouts)
      if (!cuda::operation_of(*layout).eight_bits)
        throw Error("--accumulate full is of e4m3; {} has one kind of sums: leave it or the flag out", layout->name);
  ThreadPool pool(options.threads);
  cuda::Device device({options.gpu, 0});
  if (options.plans && device.info().major != 9)
    throw Error("--plans are of the wgmma kernel, which {} does not run; leave the flag out", device.info().name);
  const TensorCorePlans measured = load_tensor_core_plans(options.profile, device.info());
  if (!options.json)
    print(
        fmt::format("{}; profile: {}; ms of a product and of the quantization of its tokens; TFLOP/s as if "
                    "dense\n{:<10} {:>6} {:>6} "
                    "{:>6} {:>9} {:>19} {:>9} {:>8} {:>9}  {}\n",
                    device.info().name, printable(measured.source), "layout", "M", "N", "K", "median", "min .. max",
                    "quantize", "TFLOP/s", "error", "kernel"));
  for (const TensorCoreProblem& problem : problems)
    for (const layout::Layout* layout : layouts) {
      const eval::RandomWeights weights =
          eval::random_weights(*layout, {problem.N * std::max(problem.groups, 1), problem.K}, options.seed + 1, pool);
      TensorCoreCase of(device, weights, problem, options.seed + 2, pool);
      report(options, measured, of, problem, *layout);
    }
  return 0;
}

template <class Table>
CLI::IsMember keys_of(const Table& table) {
  std::vector<std::string> names;
  for (const auto& row : table) names.emplace_back(row.first);
  return CLI::IsMember(names);
}

}  // namespace

Action add_image_linear(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "linear",
      "Time of linear layers on the tensor cores of a CUDA device: FP8 with a scale a token, 2:4, both, bf16. Random "
      "normal numbers, graphs of launches, results checked first.");
  command->add_option("--shape", options->shapes, "tokens, outputs, inputs; default: the twelve of QuaSpa's Table 1")
      ->delimiter(',')
      ->type_name("MxNxK");
  command->add_option("--layout", options->layouts, "of the weights: f8, nm24_f8, nm24_bf16, bf16")
      ->delimiter(',')
      ->check(layout_name())
      ->capture_default_str()
      ->type_name("NAME");
  command
      ->add_option("--accumulate", options->accumulates, "sums of e4m3: fast (in the tensor core), full (in float32)")
      ->delimiter(',')
      ->check(keys_of(kAccumulates))
      ->capture_default_str()
      ->type_name("KIND");
  command
      ->add_option("--write-back", options->write_backs,
                   "staged (through shared memory), direct (strided), separate (scaling and transposition as launches)")
      ->delimiter(',')
      ->check(keys_of(kWriteBacks))
      ->capture_default_str()
      ->type_name("KIND");
  command->add_option("--kernel", options->kernel, "best, mma (any device from 8.0 on; e4m3: 8.9), wgmma (9.0)")
      ->check(keys_of(kKernels))
      ->capture_default_str()
      ->type_name("NAME");
  command->add_flag("--plans", options->plans,
                    "every shape of blocks that the wgmma kernel has, not only the one that would be taken");
  command
      ->add_option("--groups", options->groups,
                   "grouped: the tokens are shared out to so many groups (experts), each with outputs of its own")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str()
      ->type_name("N");
  command->add_flag("--skewed", options->skewed, "group i has a share of 1/i of the tokens, not the same share");
  command->add_option("--runs", options->runs, "timed repetitions of a graph of 8 launches; the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  add_seed(*command, options->seed, "start of the random numbers");
  command->add_option("--gpu", options->gpu, "number of the CUDA device")
      ->check(CLI::Range(0, 1023))
      ->capture_default_str()
      ->type_name("N");
  add_card_profile(*command, options->profile);
  add_common(*command, *options);
  return [options] { return run(*options); };
}

}  // namespace lacuna::cli
