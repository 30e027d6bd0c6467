// src/cli/image_run.cc - `image step` and `image denoise`: a FLUX.1 transformer on tensors of a file.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <optional>

#include "cli/command.h"
#include "cli/image.h"
#include "cli/image_inputs.h"
#include "cli/image_net.h"
#include "cli/profile.h"
#include "core/progress.h"
#include "io/float_tensors.h"
#include "io/image_checkpoint.h"
#include "model/flux/config.h"

namespace lacuna::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Options : Common {
  std::string model, inputs, out;
  LoopOptions loop;
  bool explain = false;
  GpuFlags gpu;
  ProfileFlags profile;
};

/// Of each part of a step, the kernels of its products.
Json kernels_json(const model::flux::CudaPartTimes& times) {
  Json out = Json::object();
  for (size_t part = 0; part < times.kernels.size(); ++part)
    if (!times.kernels[part].empty()) out[std::string(model::flux::kPartNames[part])] = times.kernels[part];
  return out;
}

void print_kernels(const Json& kernels, const std::string& plan_source) {
  print(fmt::format("profile: {}\n", printable(plan_source)));
  for (const auto& [part, all] : kernels.items()) {
    print(part + "\n");
    for (const std::string kernel : all) print(fmt::format("  {}\n", kernel));
  }
}

int run(const Options& options, const CLI::App& command, ImageInputs::Kind kind) {
  const bool denoises = kind == ImageInputs::Kind::prompts;
  check_gpu(command, options);
  if (options.device != "cuda") refuse_given(command, {"--explain", "--profile", "--no-profile"}, "--device cuda");
  const io::ImageCheckpoint checkpoint = io::ImageCheckpoint::open(options.model);
  check_output(options.out, {options.inputs, options.loop.schedule}, checkpoint);
  const ImageInputs inputs(options.inputs, model::flux::read_config(checkpoint), options.loop, command, kind);
  refuse_unused(command, {&inputs, 1});
  const auto start = Clock::now();
  ImageNet net(checkpoint, options, options.gpu,
               {.images = inputs.images(), .text_tokens = inputs.text_tokens(), .image_tokens = inputs.image_tokens()},
               options.profile);
  const double load_s = seconds_since(start);
  std::optional<Progress> progress;
  if (denoises) progress.emplace("Denoising", inputs.runs(), "steps");
  const auto begin = Clock::now();
  io::FloatTensor result =
      inputs.run([&](std::span<const model::flux::Inputs> images, std::span<float> out) { net.predict(images, out); },
                 progress ? &*progress : nullptr);
  const double run_s = seconds_since(begin);
  if (progress) progress->hide();
  const std::vector<int64_t> dims = result.dims;
  const char* const name = denoises ? "latents" : "sample";
  io::write_float_tensors(options.out, {{name, std::move(result)}});
  const Json kernels = options.explain ? kernels_json(net.cuda()->time_parts()) : Json();
  if (options.json) {
    Json row = {{"path", options.out},
                {"batch", inputs.images()},
                {"tokens", inputs.image_tokens()},
                {"text_tokens", inputs.text_tokens()},
                {"device", options.device},
                {"load_s", load_s},
                {denoises ? "denoise_s" : "step_s", run_s},
                {"weight_bytes", checkpoint.weight_bytes()}};
    if (net.cuda() != nullptr) row["gpu"] = net.device_name();
    if (denoises) {
      row["steps"] = options.loop.steps;
      row["noise_levels"] = inputs.noise_levels();
    }
    if (options.explain) {
      row["profile"] = net.plan_source();
      row["kernels"] = kernels;
    }
    print_json(row);
    return 0;
  }
  print(fmt::format("{}: {} [{}]\nload {:.2f} s | {} {:.3f} s | peak memory {}\n", options.out, name,
                    fmt::join(dims, ", "), load_s, denoises ? fmt::format("{} steps", options.loop.steps) : "step",
                    run_s, human_bytes(peak_memory_bytes())));
  if (options.explain) print_kernels(kernels, net.plan_source());
  return 0;
}

constexpr const char* kModelHelp =
    "a folder with config.json and .safetensors as diffusers writes it, a pipeline's folder, one .safetensors file in "
    "the naming of the first release, or a GGUF file";

/// The model, the file that is read and the one that is written.
void add_files(CLI::App& command, Options& options) {
  command.add_option("MODEL", options.model, kModelHelp)->required();
  command.add_option("--inputs", options.inputs, "a .safetensors file")->required()->type_name("FILE");
  command.add_option("-o,--out", options.out, "the .safetensors file to write")->required()->type_name("FILE");
}

void add_device(CLI::App& command, Options& options) {
  command.add_flag("--explain", options.explain,
                   "also the kernels of each part's products (outputs x inputs: kernel, and where its plan comes "
                   "from), on a CUDA device, which runs a step once more");
  add_gpu_choice(command, options.gpu);
  add_card_profile(command, options.profile);
  add_common(command, options);
}

}  // namespace

Action add_image_step(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "step",
      "One denoising step of a FLUX.1 transformer: the noise prediction for the tensors of a file. --inputs holds them "
      "under the names of diffusers' FluxTransformer2DModel, F32, F16 or BF16: hidden_states [B, L, channels], "
      "encoder_hidden_states [B, T, text size], pooled_projections [B, pooled size], timestep [B] from 0 to 1, "
      "guidance [B] where the net has one, img_ids [L, 3], txt_ids [T, 3]. -o gets sample [B, L, channels] in F32. A "
      "CUDA device runs the images together.");
  add_files(*command, *options);
  add_device(*command, *options);
  return [options, command] { return run(*options, *command, ImageInputs::Kind::step); };
}

Action add_image_denoise(CLI::App& group) {
  auto options = std::make_shared<Options>();
  CLI::App* command = group.add_subcommand(
      "denoise",
      "The whole loop of a FLUX.1 transformer from noise to latents (flow matching, Euler steps). --inputs holds "
      "prompt_embeds [B, T, text size] and pooled_prompt_embeds [B, pooled size], as diffusers' pipeline makes them, "
      "and may hold the noise as latents [B, channels, H, W]. -o gets latents [B, channels, H, W] in F32, which the "
      "image autoencoder decodes once they are divided by its scale and shifted. A CUDA device runs the images "
      "together.");
  add_files(*command, *options);
  add_loop(*command, options->loop);
  add_device(*command, *options);
  return [options, command] { return run(*options, *command, ImageInputs::Kind::prompts); };
}

}  // namespace lacuna::cli
