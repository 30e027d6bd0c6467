// src/cli/image_weights.cc - `image compress`: a diffusion transformer's weights as FP8, 2:4, or both; `image policy`.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "calibrate/two_of_four_descent.h"
#include "cli/image.h"
#include "cli/image_inputs.h"
#include "core/error.h"
#include "core/say.h"
#include "io/image_compress.h"
#include "model/flux/config.h"

namespace lacuna::cli {
namespace {

struct CompressOptions : Common {
  std::string model, out, policy = "quaspa", mask = "magnitude";
  io::MaskOptions files;
};

struct PolicyOptions : Common {
  std::string name = "quaspa";
};

double bits_of(int64_t bytes, int64_t weights) { return weights > 0 ? 8.0 * double(bytes) / double(weights) : 0.0; }

void print_report(const CompressOptions& options, const io::ImageCompressReport& report, double seconds) {
  if (options.json) {
    Json layouts = Json::array();
    for (const auto& group : report.groups)
      layouts.push_back({{"layout", group.layout->name},
                         {"tensors", group.tensors},
                         {"params", group.weights},
                         {"kept", group.kept},
                         {"bytes", group.bytes},
                         {"bits", bits_of(group.bytes, group.weights)},
                         {"relative_error", group.relative_error}});
    print_json({{"path", options.out},
                {"bytes", report.file_bytes},
                {"params", report.weights},
                {"weight_bytes", report.bytes},
                {"source_bytes", report.source_bytes},
                {"policy", options.policy},
                {"mask", report.mask.empty() ? Json() : Json(report.mask)},
                {"layouts", std::move(layouts)},
                {"high_precision_bytes", report.most_float_bytes},
                {"seconds", seconds},
                {"peak_memory_bytes", peak_memory_bytes()}});
    return;
  }
  std::string out = fmt::format("{:<10} {:>8} {:>14} {:>7} {:>14} {:>7} {:>15}\n", "layout", "tensors", "weights",
                                "kept", "bytes", "bits", "relative error");
  for (const auto& group : report.groups)
    out += fmt::format("{:<10} {:>8} {:>14} {:>6.1f}% {:>14} {:>7.3f} {:>15.6f}\n", group.layout->name, group.tensors,
                       group.weights, 100 * double(group.kept) / double(group.weights), group.bytes,
                       bits_of(group.bytes, group.weights), group.relative_error);
  out += fmt::format("{}: {} ({} bytes), {:.3f} bits per weight, from {}; policy {}, {}\n", options.out,
                     human_bytes(report.file_bytes), report.file_bytes, bits_of(report.bytes, report.weights),
                     human_bytes(report.source_bytes), options.policy,
                     report.mask.empty() ? "no masks" : "masks by " + report.mask);
  print(out);
  say("{:.1f} s, peak memory {}, of which {} high-precision values at most\n", seconds,
      human_bytes(peak_memory_bytes()), human_bytes(report.most_float_bytes));
}

/// Weights of other nets may be compressed too; that none of the commands runs them is better known before the work.
void warn_unless_run(const io::ImageCheckpoint& checkpoint) {
  try {
    model::flux::read_config(checkpoint);
  } catch (const Error& error) {
    spdlog::warn("{}; `lacuna image step` and `denoise` will not run the new file", printable(error.what()));
  }
}

int compress(const CompressOptions& options) {
  check_common(options);
  io::ImageCompressOptions wanted;
  wanted.policy = io::ImagePolicy::load(options.policy);
  std::vector<std::string> read = options.files.moments;
  for (const std::string* file : {&options.files.norms, &options.files.gradients, &options.files.masks})
    read.push_back(*file);
  if (!wanted.policy.built_in()) read.push_back(options.policy);
  check_output(options.out, std::move(read), io::ImageCheckpoint::open(options.model));
  wanted.mask = options.files;
  wanted.mask.method = io::mask_method(options.mask);
  wanted.mask.descent = calibrate::descend_two_of_four;
  wanted.on_checked = warn_unless_run;
  const auto start = std::chrono::steady_clock::now();
  ThreadPool pool(options.threads);
  const io::ImageCompressReport report = io::compress_image(options.model, options.out, wanted, pool);
  for (const std::string& rule : report.unused_rules)
    spdlog::warn("{}: no matrix has a name that \"{}\" matches", options.policy, printable(rule));
  print_report(options, report, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return 0;
}

}  // namespace

Action add_image_compress(CLI::App& group) {
  auto options = std::make_shared<CompressOptions>();
  CLI::App* command = group.add_subcommand(
      "compress",
      "Store a diffusion transformer's matrices as FP8 (E4M3 with one scale an output), 2:4 sparse (two of every four "
      "inputs kept), or both, as the policy says. Each row is quantized first, then loses the weights that its mask "
      "drops; masks are made from the original weights. Vectors stay as they are.");
  command
      ->add_option("MODEL", options->model,
                   "a folder with config.json and safetensors (diffusers' transformer/, or the pipeline's folder), or "
                   "one .safetensors file, in f32, f16 or bf16")
      ->required();
  command->add_option("-o,--out", options->out, "the file to write; it appears when it is complete")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--policy", options->policy,
                   "which matrices get which layout: a policy file, or one of " + io::image_policy_names())
      ->capture_default_str()
      ->type_name("NAME|FILE");
  command
      ->add_option("--mask", options->mask,
                   "how the weights of 2:4 matrices are chosen: magnitude; wanda and e-sparse (need --norms); wanda++ "
                   "(needs --norms and --gradients); awp (needs --second-moments); file (needs --mask-file)")
      ->check(CLI::Validator(
          [](std::string& text) {
            try {
              io::mask_method(text);
            } catch (const std::exception& error) {
              return std::string(error.what());
            }
            return std::string();
          },
          ""))
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Masks");
  command
      ->add_option("--norms", options->files.norms,
                   "safetensors with the inputs' statistics: NAME.norm, for e-sparse NAME.entropy")
      ->type_name("FILE")
      ->group("Masks");
  command
      ->add_option(
          "--second-moments", options->files.moments,
          "safetensors with NAME.second_moment, as `image calibrate --second-moments` writes them; may be given "
          "several times")
      ->allow_extra_args(false)
      ->type_name("FILE")
      ->group("Masks");
  command
      ->add_flag("--awp-weights", options->files.changed_weights,
                 "store what --mask awp made of the weights that it keeps, not the original ones: an extension; QuaSpa "
                 "takes masks alone")
      ->group("Masks");
  command
      ->add_option("--gradients", options->files.gradients,
                   "safetensors with the regional gradients of each 2:4 matrix, under its name")
      ->type_name("FILE")
      ->group("Masks");
  command
      ->add_option("--mask-file", options->files.masks,
                   "safetensors with the mask of each 2:4 matrix, under its name: 0 or 1, BOOL, U8 or I8")
      ->type_name("FILE")
      ->group("Masks");
  command
      ->add_option("--alpha", options->files.alpha,
                   "weight of the gradients in wanda++ (default 100), of the norms in e-sparse (default 1)")
      ->check(number_in(0, 1e9))
      ->type_name("A")
      ->group("Masks");
  add_common(*command, *options);
  return [options] { return compress(*options); };
}

Action add_image_policy(CLI::App& group) {
  auto options = std::make_shared<PolicyOptions>();
  CLI::App* command = group.add_subcommand("policy", "Print a policy as the JSON that --policy reads, to start from.");
  command
      ->add_option("NAME", options->name, "one of " + io::image_policy_names() + ", or a policy file, which is checked")
      ->capture_default_str()
      ->type_name("NAME|FILE");
  add_common(*command, *options);
  return [options] {
    check_common(*options);
    const std::string text = io::ImagePolicy::load(options->name).text();
    if (options->json)
      print_json(Json::parse(text));
    else
      print(text);
    return 0;
  };
}

}  // namespace lacuna::cli
