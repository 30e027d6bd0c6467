// src/cli/image_inputs.h - what a FLUX.1 transformer is run on: tensors of single steps, as `image step` reads them, or
// prompts, as `image denoise` reads them, whose latents the net itself denoises.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cli/command.h"
#include "core/progress.h"
#include "io/float_tensors.h"
#include "io/image_checkpoint.h"
#include "model/flux/config.h"
#include "model/flux/net.h"

namespace lacuna::cli {

/// Flags of the loop over noise levels, which files of prompts need.
struct LoopOptions {
  std::string schedule;
  int64_t steps = 28, height = 1024, width = 1024;
  double guidance = 3.5;
  uint64_t seed = 0;
};
void add_loop(CLI::App& command, LoopOptions& options);

/// For --help: what a file of inputs may hold.
inline constexpr const char* kImageInputsHelp =
    "a .safetensors file, F32, F16 or BF16, with tensors of single steps as `image step` reads them (hidden_states, "
    "timestep, ...), or of prompts as `image denoise` reads them (prompt_embeds, pooled_prompt_embeds, latents or "
    "none)";

/// Before hours of work: the output's folder can be written to, and the output is none of the files that are read (an
/// empty name is none), those of the checkpoint among them. Throws Error.
void check_output(const std::string& out, std::vector<std::string> read, const io::ImageCheckpoint& checkpoint);

/// A run of the net on several images. out: [images][image tokens, out_channels]; prompts go on from what it gets.
using Predict = std::function<void(std::span<const model::flux::Inputs> images, std::span<float> out)>;
/// The images one after the other; an Error of `predict` gets the image in front.
Predict one_by_one(std::function<void(const model::flux::Inputs& image, std::span<float> out)> predict);

class ImageInputs {
 public:
  enum class Kind : uint8_t { any, step, prompts };
  /// Reads and checks all tensors. Throws Error naming file and tensor, and for a flag that does not fit the net.
  ImageInputs(const std::string& path, const model::flux::Config& config, const LoopOptions& options,
              const CLI::App& command, Kind kind = Kind::any);

  const std::string& path() const { return path_; }
  bool has_prompts() const { return prompts_; }
  bool from_noise() const { return from_noise_; }  // the file has no latents
  int64_t images() const { return images_; }
  int64_t image_tokens() const { return image_tokens_; }  // of one image
  int64_t text_tokens() const { return text_tokens_; }
  int64_t runs() const { return images_ * runs_per_image_; }          // of one image each
  const std::vector<float>& noise_levels() const { return levels_; }  // of prompts

  /// Each step of all images. progress: gets the images of each. Returns of single steps the predictions [images, image
  /// tokens, out_channels], of prompts the latents [images, channels, height, width]. An Error of predict's gets file
  /// and step in front.
  io::FloatTensor run(const Predict& predict, Progress* progress = nullptr) const;

 private:
  const io::FloatTensor* find(const char* name) const;
  /// dims: what the tensor's must be; -1: any.
  const io::FloatTensor& need(const char* name, const std::vector<int64_t>& dims) const;
  void check_step();
  void check_prompts(const LoopOptions& options, const CLI::App& command);
  io::FloatTensor run_step(const Predict& predict, Progress* progress) const;
  io::FloatTensor run_prompts(const Predict& predict, Progress* progress) const;
  void add_noise(const LoopOptions& options);

  std::string path_;
  model::flux::Config config_;
  io::FloatTensors tensors_;
  bool prompts_ = false, from_noise_ = false;
  int64_t images_ = 0, image_tokens_ = 0, text_tokens_ = 0, runs_per_image_ = 1;
  std::vector<float> levels_;
  double guidance_ = 0;  // of prompts
};

/// Throws Error for flags of add_loop that none of the inputs takes.
void refuse_unused(const CLI::App& command, std::span<const ImageInputs> inputs);

}  // namespace lacuna::cli
