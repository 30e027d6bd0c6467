#include "cli/image_inputs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "cli/image.h"
#include "core/error.h"
#include "io/atomic_file.h"
#include "model/flux/sampler.h"

namespace lacuna::cli {

using io::FloatTensor;
using model::flux::Inputs;
using model::flux::LatentShape;

namespace {

/// Row `index` of a tensor's first dimension.
std::span<const float> part(const FloatTensor& tensor, int64_t index) {
  const auto size = tensor.values.size() / size_t(tensor.dims[0]);
  return std::span(tensor.values).subspan(size_t(index) * size, size);
}

}  // namespace

void add_loop(CLI::App& command, LoopOptions& options) {
  const char* group = "Prompts";
  command.add_option("--steps", options.steps, "denoising steps")
      ->check(integer_in(1, 1000))
      ->capture_default_str()
      ->type_name("N")
      ->group(group);
  command.add_option("--height", options.height, "of the image in pixels, where the inputs have no latents")
      ->check(image_side())
      ->capture_default_str()
      ->type_name("PIXELS")
      ->group(group);
  command.add_option("--width", options.width, "the same")
      ->check(image_side())
      ->capture_default_str()
      ->type_name("PIXELS")
      ->group(group);
  command.add_option("--guidance", options.guidance, "guidance scale, for nets that have an embedding of it")
      ->check(number_in(0, 1000))
      ->capture_default_str()
      ->type_name("G")
      ->group(group);
  command
      .add_option(
          "--schedule", options.schedule,
          "a scheduler_config.json; default: FLUX.1-dev's settings where the net has a guidance embedding, else "
          "FLUX.1-schnell's")
      ->type_name("FILE")
      ->group(group);
  add_seed(command, options.seed, "start of the random noise, where the inputs have no latents")->group(group);
}

void check_output(const std::string& out, std::vector<std::string> read, const io::ImageCheckpoint& checkpoint) {
  check_out("-o", out);
  read.push_back(checkpoint.config_path());
  read.push_back(checkpoint.path());
  for (const auto& [name, tensor] : checkpoint.tensors())
    if (const std::string& file = checkpoint.file_of(name); file != read.back()) read.push_back(file);
  std::error_code unknown;  // then they are not the same file
  for (const std::string& path : read)
    if (std::filesystem::equivalent(path, out, unknown))
      throw Error("{}: is a file that is read; give the new file another name", out);
  if (!std::filesystem::exists(out, unknown) || std::filesystem::is_regular_file(out, unknown))
    const io::AtomicFile can_be_made(out);
}

ImageInputs::ImageInputs(const std::string& path, const model::flux::Config& config, const LoopOptions& options,
                         const CLI::App& command, Kind kind)
    : path_(path), config_(config), tensors_(io::read_float_tensors(path)) {
  const bool step = kind == Kind::step || (kind == Kind::any && find("hidden_states") != nullptr);
  prompts_ = kind == Kind::prompts || (kind == Kind::any && find("prompt_embeds") != nullptr);
  if (step && prompts_)
    throw Error("{}: has hidden_states of single steps and prompt_embeds of prompts; keep one of them", path);
  if (!step && !prompts_)
    throw Error("{}: has neither hidden_states, as `image step` reads, nor prompt_embeds, as `image denoise` reads",
                path);
  if (prompts_)
    check_prompts(options, command);
  else
    check_step();
}

void refuse_unused(const CLI::App& command, std::span<const ImageInputs> inputs) {
  const std::string which = inputs.size() == 1 ? inputs.front().path() : "none of the inputs";
  if (std::ranges::none_of(inputs, &ImageInputs::has_prompts))
    refuse_given(command, {"--steps", "--height", "--width", "--guidance", "--schedule", "--seed"},
                 "prompt_embeds, which " + which + (inputs.size() == 1 ? " does not have" : " has"));
  if (std::ranges::none_of(inputs, &ImageInputs::from_noise))
    refuse_given(command, {"--height", "--width", "--seed"},
                 "inputs without latents, but " + (inputs.size() == 1 ? which + " has them" : "all inputs have them"));
}

const FloatTensor* ImageInputs::find(const char* name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const FloatTensor& ImageInputs::need(const char* name, const std::vector<int64_t>& dims) const {
  const FloatTensor* tensor = find(name);
  if (tensor == nullptr) throw Error("{}: tensor {} is missing", path_, name);
  bool fits = tensor->dims.size() == dims.size() && !tensor->values.empty();
  for (size_t i = 0; fits && i < dims.size(); ++i) fits = dims[i] == -1 || tensor->dims[i] == dims[i];
  if (fits) return *tensor;
  std::string wanted;
  for (const int64_t dim : dims) wanted += (wanted.empty() ? "" : ", ") + (dim < 0 ? "any" : std::to_string(dim));
  throw Error("{}: tensor {} has shape [{}], expected [{}]", path_, name, fmt::join(tensor->dims, ", "), wanted);
}

void ImageInputs::check_step() {
  const auto axes = int64_t(config_.rope_axes.size());
  const FloatTensor& latents = need("hidden_states", {-1, -1, config_.in_channels});
  images_ = latents.dims[0];
  const FloatTensor& text = need("encoder_hidden_states", {images_, -1, config_.text_dim});
  image_tokens_ = latents.dims[1], text_tokens_ = text.dims[1];
  need("pooled_projections", {images_, config_.pooled_dim});
  for (const float level : need("timestep", {images_}).values)
    if (!(level >= 0 && level <= 1))
      throw Error("{}: timestep holds {}, but noise levels go from 0 to 1 (a scheduler's step over 1000)", path_,
                  level);
  if (config_.guidance) need("guidance", {images_});
  need("img_ids", {latents.dims[1], axes});
  need("txt_ids", {text.dims[1], axes});
}

void ImageInputs::check_prompts(const LoopOptions& options, const CLI::App& command) {
  if (command.count("--guidance") > 0 && !config_.guidance)
    throw Error("--guidance {}: the net has no guidance embedding; leave it out", options.guidance);
  if (config_.in_channels % 4 != 0 || config_.out_channels != config_.in_channels || config_.rope_axes.size() != 3)
    throw Error(
        "{}: has prompts, but the net has in_channels {}, out_channels {} and {} rope axes; the loop needs as many "
        "channels out as in, a multiple of 4, and 3 axes",
        path_, config_.in_channels, config_.out_channels, config_.rope_axes.size());
  const FloatTensor& text = need("prompt_embeds", {-1, -1, config_.text_dim});
  images_ = text.dims[0], text_tokens_ = text.dims[1];
  need("pooled_prompt_embeds", {images_, config_.pooled_dim});
  if (find("latents") == nullptr) add_noise(options);
  const FloatTensor& latents = need("latents", {images_, config_.in_channels / 4, -1, -1});
  for (const size_t side : {2, 3})
    if (latents.dims[side] % 2 != 0)
      throw Error("{}: tensor latents has shape [{}]; height and width must be even", path_,
                  fmt::join(latents.dims, ", "));
  const model::flux::Schedule schedule =
      options.schedule.empty() ? model::flux::usual_schedule(config_.guidance)
                               : model::flux::parse_schedule(read_input(options.schedule), options.schedule);
  image_tokens_ = latents.dims[2] / 2 * (latents.dims[3] / 2);
  levels_ = model::flux::noise_levels(schedule, options.steps, image_tokens_);
  for (const float level : levels_)
    if (!(level >= 0 && level <= 1))
      throw Error("{}: the schedule's shifts make a noise level of {} for {} tokens, but levels go from 1 to 0",
                  options.schedule.empty() ? path_ : options.schedule, level, image_tokens_);
  runs_per_image_ = options.steps;
  guidance_ = options.guidance;
}

void ImageInputs::add_noise(const LoopOptions& options) {
  constexpr int64_t kPixelsPerLatent = kPixelsPerToken / 2;  // along one side
  const LatentShape shape{config_.in_channels / 4, options.height / kPixelsPerLatent, options.width / kPixelsPerLatent};
  FloatTensor noise{{images_, shape.channels, shape.height, shape.width}, {}};
  for (int64_t image = 0; image < images_; ++image) {
    const std::vector<float> values = model::flux::random_latents(shape, options.seed, image);
    noise.values.insert(noise.values.end(), values.begin(), values.end());
  }
  tensors_.emplace("latents", std::move(noise));
  from_noise_ = true;
}

Predict one_by_one(std::function<void(const Inputs& image, std::span<float> out)> predict) {
  return [predict = std::move(predict)](std::span<const Inputs> images, std::span<float> out) {
    const size_t size = out.size() / images.size();
    for (size_t b = 0; b < images.size(); ++b)
      naming_file(fmt::format("image {}", b), [&] { predict(images[b], out.subspan(b * size, size)); });
  };
}

FloatTensor ImageInputs::run(const Predict& predict, Progress* progress) const {
  return prompts_ ? run_prompts(predict, progress) : run_step(predict, progress);
}

FloatTensor ImageInputs::run_step(const Predict& predict, Progress* progress) const {
  const FloatTensor* guidance = config_.guidance ? find("guidance") : nullptr;
  std::vector<Inputs> images;
  for (int64_t b = 0; b < images_; ++b)
    images.push_back({part(tensors_.at("hidden_states"), b), part(tensors_.at("encoder_hidden_states"), b),
                      part(tensors_.at("pooled_projections"), b), tensors_.at("timestep").values[size_t(b)],
                      guidance != nullptr ? guidance->values[size_t(b)] : 0.0f, tensors_.at("img_ids").values,
                      tensors_.at("txt_ids").values});
  FloatTensor out{{images_, image_tokens_, config_.out_channels},
                  std::vector<float>(size_t(images_ * image_tokens_ * config_.out_channels))};
  naming_file(path_, [&] { predict(images, out.values); });
  if (progress != nullptr) progress->add(images_);
  return out;
}

FloatTensor ImageInputs::run_prompts(const Predict& predict, Progress* progress) const {
  const FloatTensor &noise = tensors_.at("latents"), &text = tensors_.at("prompt_embeds");
  const LatentShape shape{noise.dims[1], noise.dims[2], noise.dims[3]};
  const std::vector<float> image_ids = model::flux::image_ids(shape);
  const std::vector<float> text_ids(size_t(text_tokens_) * config_.rope_axes.size(), 0.0f);
  std::vector<std::vector<float>> x;
  for (int64_t b = 0; b < images_; ++b) x.push_back(model::flux::pack_latents(part(noise, b), shape));
  const auto size = size_t(shape.values());
  std::vector<float> directions(size * x.size());
  for (size_t i = 0; i + 1 < levels_.size(); ++i) {
    std::vector<Inputs> images;
    for (int64_t b = 0; b < images_; ++b)
      images.push_back({x[size_t(b)], part(text, b), part(tensors_.at("pooled_prompt_embeds"), b), levels_[i],
                        guidance_, image_ids, text_ids});
    naming_file(fmt::format("{}: step {}", path_, i), [&] { predict(images, directions); });
    for (size_t b = 0; b < x.size(); ++b)
      model::flux::euler_step(x[b], std::span(directions).subspan(b * size, size), levels_[i], levels_[i + 1]);
    if (progress != nullptr) progress->add(images_);
  }
  FloatTensor out{noise.dims, {}};
  for (const std::vector<float>& image : x) {
    const std::vector<float> latents = model::flux::unpack_latents(image, shape);
    out.values.insert(out.values.end(), latents.begin(), latents.end());
  }
  return out;
}

}  // namespace lacuna::cli
