// src/model/flux/net.h - the FLUX.1 transformer: predicts from noisy latents the direction from image to noise.
//
// Float32 arithmetic on weights in any layout. Compared with diffusers' FluxTransformer2DModel in
// tests/model/flux_test.cc.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/thread_pool.h"
#include "io/image_checkpoint.h"
#include "model/flux/block.h"
#include "model/flux/config.h"
#include "model/flux/linear.h"
#include "model/flux/part_times.h"

namespace lacuna::model::flux {

/// One image at one noise level.
struct Inputs {
  std::span<const float> latents;    // [image tokens, in_channels]
  std::span<const float> text;       // [text tokens, text_dim]
  std::span<const float> pooled;     // [pooled_dim]
  double timestep = 0;               // noise level, 0 to 1
  double guidance = 0;               // read by nets with a guidance embedding
  std::span<const float> image_ids;  // [image tokens, rope axes]: coordinates
  std::span<const float> text_ids;   // [text tokens, rope axes]
};

/// Throws Error for inputs, or for room for results, whose sizes do not fit the net.
void check_inputs(const Config& config, const Inputs& inputs, int64_t results);
/// Throws Error naming where, and the first value that is not finite.
void check_finite(std::span<const float> values, std::string_view where);

/// Before their sinusoids timestep and guidance are multiplied with this.
inline constexpr double kTimeScale = 1000;

/// Sees results on their way, by diffusers' names of modules: x_embedder, context_embedder, time_text_embed,
/// transformer_blocks.N (image) and transformer_blocks.N.text, single_transformer_blocks.N (image) and its .text,
/// norm_out.
using Observer = std::function<void(std::string_view name, std::span<const float> values)>;

class Net {
 public:
  Net(const Net&) = delete;  // its workspace refers to its configuration
  Net& operator=(const Net&) = delete;
  /// Binds and prepares every weight; the checkpoint and the pool must outlive the net. Throws Error naming tensor and
  /// file.
  Net(const io::ImageCheckpoint& checkpoint, ThreadPool& pool);

  const Config& config() const { return config_; }
  /// out: [image tokens, out_channels]. Throws Error for inputs whose sizes do not fit the net, and naming the block
  /// after which a value is not finite. layers: sees the inputs of every linear layer.
  void predict(const Inputs& inputs, std::span<float> out, const Observer* observer = nullptr,
               const InputObserver* layers = nullptr);
  const PartTimes& times() const { return workspace_.times; }
  void reset_times() { workspace_.times.reset(); }

 private:
  /// Linear, SiLU, linear.
  struct Embedder {
    Linear first, second;
    void add(std::vector<float> x, std::span<float> sum, const InputObserver* observer);
  };
  Embedder make_embedder(Binder& binder, const char* name, int64_t inputs);
  std::vector<float> embed_conditions(const Inputs& inputs);

  Config config_;
  ThreadPool& pool_;
  std::deque<std::vector<float>> biases_;
  Linear latents_, text_, scale_, shift_, last_;
  Embedder timestep_, guidance_, pooled_;
  std::vector<DoubleBlock> double_;
  std::vector<SingleBlock> single_;
  Workspace workspace_;
  std::vector<float> hidden_;  // [tokens, width]: text, then image
};

}  // namespace lacuna::model::flux
