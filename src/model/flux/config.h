// src/model/flux/config.h - hyperparameters of FLUX.1-type transformers.
//
// From config.json as diffusers writes it for FluxTransformer2DModel (keys: num_layers, num_single_layers,
// num_attention_heads, attention_head_dim, in_channels, out_channels, joint_attention_dim, pooled_projection_dim,
// guidance_embeds, axes_dims_rope, patch_size, mlp_ratio), or, for files in the naming of the first release, which have
// none, from the shapes of their tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/image_checkpoint.h"

namespace lacuna::model::flux {

/// Values of the sinusoidal embedding of timestep and guidance.
inline constexpr int64_t kTimeFrequencies = 256;

/// Mixture of experts in place of an MLP (QuaSpa, section 3.3.3): the image stream of the double blocks and the single
/// blocks have it, the text stream keeps its MLP. The paper names no shape; these keys of config.json are ours:
/// moe_num_experts, moe_top_k, moe_intermediate_size, moe_norm_topk_prob.
struct MoeConfig {
  int64_t n_experts = 0;  // 0: dense MLPs
  int64_t top_k = 0;      // experts of a token
  int64_t width = 0;      // of an expert
  bool normalize = true;  // the chosen experts' probabilities are divided by their sum
  friend bool operator==(const MoeConfig&, const MoeConfig&) = default;
};

struct Config {
  int64_t in_channels = 64, out_channels = 64;  // of a token of 2 x 2 latent pixels
  int64_t n_double = 19, n_single = 38;
  int64_t n_heads = 24, head_dim = 128;
  int64_t text_dim = 4096, pooled_dim = 768;
  int64_t mlp_width = 4 * 24 * 128;
  bool guidance = false;
  std::vector<int64_t> rope_axes = {16, 56,
                                    56};  // dimensions of a head turned by each coordinate; their sum is head_dim
  MoeConfig moe;

  int64_t width() const { return n_heads * head_dim; }
  friend bool operator==(const Config&, const Config&) = default;
};

/// The two namings of public files.
enum class Naming : uint8_t { diffusers, original };

/// Of a checkpoint's tensors. Throws Error for tensors of neither naming.
Naming naming_of(const io::ImageCheckpoint& checkpoint);

/// Of text as in config.json. Throws Error (starting with `where`) naming the key for what this program does not run.
Config parse_config(const std::string& text, const std::string& where);

/// The inverse of parse_config: text of a config.json.
std::string format_config(const Config& config);

/// parse_config where the checkpoint has one, else from shapes, for heads of 128, which have the rope axes 16, 56, 56.
Config read_config(const io::ImageCheckpoint& checkpoint);

/// Throws Error (starting with `where`) for sizes that contradict each other.
void check_config(const Config& config, const std::string& where);

}  // namespace lacuna::model::flux
