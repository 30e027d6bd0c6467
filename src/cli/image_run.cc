// src/cli/image_run.cc - `image step` and `image denoise`: a FLUX.1 transformer on tensors of a file.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "cli/command.h"
#include "cli/image.h"
#include "cli/image_net.h"
#include "core/error.h"
#include "core/progress.h"
#include "io/float_tensors.h"
#include "io/image_checkpoint.h"
#include "model/flux/config.h"
#include "model/flux/sampler.h"

namespace lacuna::cli {
namespace {

using model::flux::LatentShape;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// The tensors of --inputs, by name, their shapes checked.
class InputFile {
 public:
  explicit InputFile(const std::string& path) : path_(path), tensors_(io::read_float_tensors(path)) {}

  const io::FloatTensor* find(const char* name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : &found->second;
  }
  /// dims: what the tensor's must be; -1: any. Throws Error naming file and tensor.
  const io::FloatTensor& need(const char* name, const std::vector<int64_t>& dims) const {
    const io::FloatTensor* tensor = find(name);
    if (tensor == nullptr) throw Error("{}: tensor {} is missing", path_, name);
    bool fits = tensor->dims.size() == dims.size();
    for (size_t i = 0; fits && i < dims.size(); ++i) fits = dims[i] == -1 || tensor->dims[i] == dims[i];
    if (fits) return *tensor;
    std::string wanted;
    for (const int64_t dim : dims) wanted += (wanted.empty() ? "" : ", ") + (dim < 0 ? "any" : std::to_string(dim));
    throw Error("{}: tensor {} has shape [{}], expected [{}]", path_, name, fmt::join(tensor->dims, ", "), wanted);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  io::FloatTensors tensors_;
};

/// Row `index` of a tensor's first dimension.
std::span<const float> part(const io::FloatTensor& tensor, int64_t index) {
  const auto size = tensor.values.size() / size_t(tensor.dims[0]);
  return std::span(tensor.values).subspan(size_t(index) * size, size);
}

struct StepOptions : Common {
  std::string model, inputs, out;
  GpuFlags gpu;
};

int step(const StepOptions& options) {
  check_out("-o", options.out);
  const InputFile inputs(options.inputs);
  const io::ImageCheckpoint checkpoint = io::ImageCheckpoint::open(options.model);
  const model::flux::Config config = model::flux::read_config(checkpoint);
  const auto axes = int64_t(config.rope_axes.size());
  const io::FloatTensor& latents = inputs.need("hidden_states", {-1, -1, config.in_channels});
  const int64_t batch = latents.dims[0], tokens = latents.dims[1];
  const io::FloatTensor& text = inputs.need("encoder_hidden_states", {batch, -1, config.text_dim});
  const io::FloatTensor& pooled = inputs.need("pooled_projections", {batch, config.pooled_dim});
  const io::FloatTensor& timestep = inputs.need("timestep", {batch});
  const io::FloatTensor* guidance = config.guidance ? &inputs.need("guidance", {batch}) : nullptr;
  const io::FloatTensor& image_ids = inputs.need("img_ids", {tokens, axes});
  const io::FloatTensor& text_ids = inputs.need("txt_ids", {text.dims[1], axes});

  std::vector<model::flux::Inputs> images;
  for (int64_t b = 0; b < batch; ++b)
    images.push_back({part(latents, b), part(text, b), part(pooled, b), timestep.values[size_t(b)],
                      guidance != nullptr ? guidance->values[size_t(b)] : 0.0f, image_ids.values, text_ids.values});
  const auto start = Clock::now();
  ImageNet net(checkpoint, options, options.gpu,
               {.images = batch, .text_tokens = text.dims[1], .image_tokens = tokens});
  const double load_s = seconds_since(start);
  io::FloatTensor sample{{batch, tokens, config.out_channels},
                         std::vector<float>(size_t(batch * tokens * config.out_channels))};
  const auto begin = Clock::now();
  net.predict(images, sample.values);
  const double step_s = seconds_since(begin);
  io::write_float_tensors(options.out, {{"sample", std::move(sample)}});
  if (options.json)
    print_json({{"path", options.out},
                {"batch", batch},
                {"tokens", tokens},
                {"text_tokens", text.dims[1]},
                {"device", net.device_name()},
                {"load_s", load_s},
                {"step_s", step_s},
                {"weight_bytes", checkpoint.weight_bytes()}});
  else
    print(fmt::format("{}: sample [{}, {}, {}]\nload {:.2f} s | step {:.3f} s | peak memory {}\n", options.out, batch,
                      tokens, config.out_channels, load_s, step_s, human_bytes(peak_memory_bytes())));
  return 0;
}

struct DenoiseOptions : Common {
  std::string model, inputs, out, schedule;
  int64_t steps = 28, height = 1024, width = 1024;
  double guidance = 3.5;
  uint64_t seed = 0;
  GpuFlags gpu;
};

constexpr int64_t kPixelsPerLatent = kPixelsPerToken / 2;  // along one side

model::flux::Schedule schedule_of(const DenoiseOptions& options, const model::flux::Config& config) {
  if (options.schedule.empty()) return model::flux::usual_schedule(config.guidance);
  return model::flux::parse_schedule(read_input(options.schedule), options.schedule);
}

/// Noise: of the file where it has some, else random. [batch, channels, height, width]
io::FloatTensor first_latents(const DenoiseOptions& options, const InputFile& inputs, int64_t batch, int64_t channels) {
  if (inputs.find("latents") != nullptr) {
    const io::FloatTensor& given = inputs.need("latents", {batch, channels, -1, -1});
    for (const size_t side : {2, 3})
      if (given.dims[side] < 2 || given.dims[side] % 2 != 0)
        throw Error("{}: tensor latents has shape [{}]; height and width must be even", inputs.path(),
                    fmt::join(given.dims, ", "));
    return given;
  }
  const LatentShape shape{channels, options.height / kPixelsPerLatent, options.width / kPixelsPerLatent};
  io::FloatTensor out{{batch, channels, shape.height, shape.width}, {}};
  for (int64_t b = 0; b < batch; ++b) {
    const std::vector<float> image = model::flux::random_latents(shape, options.seed, b);
    out.values.insert(out.values.end(), image.begin(), image.end());
  }
  return out;
}

int denoise(const DenoiseOptions& options, bool has_guidance) {
  check_out("-o", options.out);
  const InputFile inputs(options.inputs);
  const io::ImageCheckpoint checkpoint = io::ImageCheckpoint::open(options.model);
  const model::flux::Config config = model::flux::read_config(checkpoint);
  if (has_guidance && !config.guidance)
    throw Error("--guidance {}: {} has no guidance embedding; leave it out", options.guidance, options.model);
  if (config.in_channels % 4 != 0 || config.out_channels != config.in_channels || config.rope_axes.size() != 3)
    throw Error(
        "{}: in_channels {}, out_channels {} and {} rope axes; the loop needs as many channels out as in, a "
        "multiple of 4, and 3 axes",
        options.model, config.in_channels, config.out_channels, config.rope_axes.size());
  const io::FloatTensor& text = inputs.need("prompt_embeds", {-1, -1, config.text_dim});
  const int64_t batch = text.dims[0];
  const io::FloatTensor& pooled = inputs.need("pooled_prompt_embeds", {batch, config.pooled_dim});
  io::FloatTensor latents = first_latents(options, inputs, batch, config.in_channels / 4);
  const LatentShape shape{latents.dims[1], latents.dims[2], latents.dims[3]};
  const std::vector<float> levels =
      model::flux::noise_levels(schedule_of(options, config), options.steps, shape.tokens());
  const std::vector<float> image_ids = model::flux::image_ids(shape);
  const std::vector<float> text_ids(size_t(text.dims[1]) * config.rope_axes.size(), 0.0f);

  const auto start = Clock::now();
  ImageNet net(checkpoint, options, options.gpu,
               {.images = batch, .text_tokens = text.dims[1], .image_tokens = shape.tokens()});
  const double load_s = seconds_since(start);
  const auto begin = Clock::now();
  Progress progress("Denoising", batch * options.steps, "steps");
  const auto size = size_t(shape.values());
  std::vector<std::vector<float>> x;
  for (int64_t b = 0; b < batch; ++b) x.push_back(model::flux::pack_latents(part(latents, b), shape));
  std::vector<float> directions(size * size_t(batch));
  for (int64_t i = 0; i < options.steps; ++i) {
    const float level = levels[size_t(i)];
    std::vector<model::flux::Inputs> images;
    for (int64_t b = 0; b < batch; ++b)
      images.push_back({x[size_t(b)], part(text, b), part(pooled, b), level, options.guidance, image_ids, text_ids});
    naming_file(fmt::format("step {}", i), [&] { net.predict(images, directions); });
    for (int64_t b = 0; b < batch; ++b)
      model::flux::euler_step(x[size_t(b)], std::span(directions).subspan(size_t(b) * size, size), level,
                              levels[size_t(i + 1)]);
    progress.add(batch);
  }
  for (int64_t b = 0; b < batch; ++b)
    std::ranges::copy(model::flux::unpack_latents(x[size_t(b)], shape), latents.values.begin() + b * shape.values());
  progress.hide();
  const double denoise_s = seconds_since(begin);
  const std::vector<int64_t> dims = latents.dims;
  io::write_float_tensors(options.out, {{"latents", std::move(latents)}});
  if (options.json)
    print_json({{"path", options.out},
                {"batch", batch},
                {"steps", options.steps},
                {"tokens", shape.tokens()},
                {"text_tokens", text.dims[1]},
                {"noise_levels", levels},
                {"device", net.device_name()},
                {"load_s", load_s},
                {"denoise_s", denoise_s},
                {"weight_bytes", checkpoint.weight_bytes()}});
  else
    print(fmt::format("{}: latents [{}]\nload {:.2f} s | {} steps {:.2f} s | peak memory {}\n", options.out,
                      fmt::join(dims, ", "), load_s, options.steps, denoise_s, human_bytes(peak_memory_bytes())));
  return 0;
}

constexpr const char* kModelHelp =
    "a folder with config.json and .safetensors as diffusers writes it, a pipeline's folder, one .safetensors file in "
    "the naming of the first release, or a GGUF file";

/// The model, the file that is read and the one that is written.
template <class Options>
void add_files(CLI::App& command, Options& options) {
  command.add_option("MODEL", options.model, kModelHelp)->required();
  command.add_option("--inputs", options.inputs, "a .safetensors file")->required()->type_name("FILE");
  command.add_option("-o,--out", options.out, "the .safetensors file to write")->required()->type_name("FILE");
}

}  // namespace

Action add_image_step(CLI::App& group) {
  auto options = std::make_shared<StepOptions>();
  CLI::App* command = group.add_subcommand(
      "step",
      "One denoising step of a FLUX.1 transformer: the noise prediction for the tensors of a file. --inputs holds them "
      "under the names of diffusers' FluxTransformer2DModel, F32, F16 or BF16: hidden_states [B, L, channels], "
      "encoder_hidden_states [B, T, text size], pooled_projections [B, pooled size], timestep [B] from 0 to 1, "
      "guidance "
      "[B] where the net has one, img_ids [L, 3], txt_ids [T, 3]. -o gets sample [B, L, channels] in F32. A CUDA "
      "device "
      "runs the images together.");
  add_files(*command, *options);
  add_gpu_choice(*command, options->gpu);
  add_common(*command, *options);
  return [options, command] {
    check_gpu(*command, *options);
    return step(*options);
  };
}

Action add_image_denoise(CLI::App& group) {
  auto options = std::make_shared<DenoiseOptions>();
  CLI::App* command = group.add_subcommand(
      "denoise",
      "The whole loop of a FLUX.1 transformer from noise to latents (flow matching, Euler steps). --inputs holds "
      "prompt_embeds [B, T, text size] and pooled_prompt_embeds [B, pooled size], as diffusers' pipeline makes them, "
      "and may hold the noise as latents [B, channels, H, W]. -o gets latents [B, channels, H, W] in F32, which the "
      "image autoencoder decodes once they are divided by its scale and shifted.");
  add_files(*command, *options);
  command->add_option("--steps", options->steps, "denoising steps")
      ->check(integer_in(1, 1000))
      ->capture_default_str()
      ->type_name("N");
  command->add_option("--height", options->height, "of the image in pixels, where --inputs has no latents")
      ->check(image_side())
      ->capture_default_str()
      ->type_name("PIXELS");
  command->add_option("--width", options->width, "the same")
      ->check(image_side())
      ->capture_default_str()
      ->type_name("PIXELS");
  CLI::Option* guidance =
      command->add_option("--guidance", options->guidance, "guidance scale, for nets that have an embedding of it")
          ->check(number_in(0, 1000))
          ->capture_default_str()
          ->type_name("G");
  command
      ->add_option(
          "--schedule", options->schedule,
          "a scheduler_config.json; default: FLUX.1-dev's settings where the net has a guidance embedding, else "
          "FLUX.1-schnell's")
      ->type_name("FILE");
  add_seed(*command, options->seed, "start of the random noise, where --inputs has no latents");
  add_gpu_choice(*command, options->gpu);
  add_common(*command, *options);
  return [options, command, guidance] {
    check_gpu(*command, *options);
    return denoise(*options, guidance->count() > 0);
  };
}

}  // namespace lacuna::cli
