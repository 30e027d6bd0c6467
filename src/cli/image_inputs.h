// src/cli/image_inputs.h - what a FLUX.1 transformer is run on where its layers are looked at: tensors of single steps,
// as `image step` reads them, or prompts, as `image denoise` reads them, whose latents the net itself denoises.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cli/command.h"
#include "io/float_tensors.h"
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

/// One run of the net. out: [image tokens, out_channels]; prompts go on from what it gets.
using Predict = std::function<void(const model::flux::Inputs& inputs, std::span<float> out)>;

class ImageInputs {
 public:
  /// Reads and checks all tensors. Throws Error naming file and tensor, and for flags that have no meaning here.
  ImageInputs(const std::string& path, const model::flux::Config& config, const LoopOptions& options,
              const CLI::App& command);

  int64_t images() const { return images_; }
  int64_t runs() const { return images_ * runs_per_image_; }
  /// An Error of predict's gets file, image and step in front.
  void run(const Predict& predict) const;

 private:
  const io::FloatTensor* find(const char* name) const;
  /// dims: what the tensor's must be; -1: any.
  const io::FloatTensor& need(const char* name, const std::vector<int64_t>& dims) const;
  void check_step();
  void check_prompts(const LoopOptions& options, const CLI::App& command);
  void run_step(int64_t image, const Predict& predict) const;
  void run_prompt(int64_t image, const Predict& predict) const;
  void add_noise(const LoopOptions& options);

  std::string path_;
  model::flux::Config config_;
  io::FloatTensors tensors_;
  bool prompts_ = false;
  int64_t images_ = 0, runs_per_image_ = 1;
  std::vector<float> levels_;  // of prompts
  double guidance_ = 0;        // of prompts
};

}  // namespace lacuna::cli
