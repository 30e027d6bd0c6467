#include "model/flux/names.h"

#include <fmt/format.h>

namespace lacuna::model::flux {

namespace {

using Places = std::map<std::string, Place>;

/// One modality of a double block. ours: names of the net after "transformer_blocks.N."; theirs: "img" or "txt".
struct StreamNames {
  const char* modulation;
  const char* qkv[3];
  const char* norm[2];
  const char* out;
  const char* mlp;
  const char* theirs;
};
constexpr StreamNames kStreams[] = {
    {"norm1.linear",
     {"attn.to_q", "attn.to_k", "attn.to_v"},
     {"attn.norm_q", "attn.norm_k"},
     "attn.to_out.0",
     "ff",
     "img"},
    {"norm1_context.linear",
     {"attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"},
     {"attn.norm_added_q", "attn.norm_added_k"},
     "attn.to_add_out",
     "ff_context",
     "txt"},
};
constexpr const char* kNorms[] = {"query_norm", "key_norm"};

void add_double(int64_t block, int64_t width, Places& out) {
  const std::string ours = fmt::format("transformer_blocks.{}.", block),
                    theirs = fmt::format("double_blocks.{}.", block);
  for (const StreamNames& stream : kStreams) {
    const std::string prefix = theirs + stream.theirs;
    out[ours + stream.modulation] = {prefix + "_mod.lin"};
    for (int i = 0; i < 3; ++i) out[ours + stream.qkv[i]] = {prefix + "_attn.qkv", "weight", i * width, 3 * width};
    for (int i = 0; i < 2; ++i) out[ours + stream.norm[i]] = {prefix + "_attn.norm." + kNorms[i], "scale"};
    out[ours + stream.out] = {prefix + "_attn.proj"};
    out[ours + stream.mlp + ".net.0.proj"] = {prefix + "_mlp.0"};
    out[ours + stream.mlp + ".net.2"] = {prefix + "_mlp.2"};
  }
}

void add_single(int64_t block, const Config& config, Places& out) {
  const std::string ours = fmt::format("single_transformer_blocks.{}.", block);
  const std::string theirs = fmt::format("single_blocks.{}.", block);
  const int64_t width = config.width(), total = 3 * width + config.mlp_width;
  out[ours + "norm.linear"] = {theirs + "modulation.lin"};
  const char* parts[] = {"attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"};
  for (int i = 0; i < 4; ++i) out[ours + parts[i]] = {theirs + "linear1", "weight", i * width, total};
  out[ours + "attn.norm_q"] = {theirs + "norm.query_norm", "scale"};
  out[ours + "attn.norm_k"] = {theirs + "norm.key_norm", "scale"};
  out[ours + "proj_out"] = {theirs + "linear2"};
}

class Shapes {
 public:
  void linear(const std::string& name, int64_t N, int64_t K, bool bias = true) {
    out_.push_back({name + ".weight", {N, K}});
    if (bias) vector(name + ".bias", N);
  }
  void vector(const std::string& name, int64_t n) { out_.push_back({name, {1, n}, true}); }
  void mlp(const std::string& name, int64_t width, int64_t inner) {
    linear(name + ".net.0.proj", inner, width);
    linear(name + ".net.2", width, inner);
  }
  void experts(const std::string& name, const Config& config) {
    linear(name + ".gate", config.moe.n_experts, config.width(), false);
    for (int64_t e = 0; e < config.moe.n_experts; ++e)
      mlp(fmt::format("{}.experts.{}", name, e), config.width(), config.moe.width);
  }
  std::vector<TensorShape> take() { return std::move(out_); }

 private:
  std::vector<TensorShape> out_;
};

}  // namespace

std::map<std::string, Place> places(const Config& config, Naming naming) {
  Places out;
  const int64_t width = config.width();
  if (naming == Naming::diffusers) {
    out["norm_out.scale"] = {"norm_out.linear", "weight", 0, 2 * width};
    out["norm_out.shift"] = {"norm_out.linear", "weight", width, 2 * width};
    return out;
  }
  out["norm_out.shift"] = {"final_layer.adaLN_modulation.1", "weight", 0, 2 * width};
  out["norm_out.scale"] = {"final_layer.adaLN_modulation.1", "weight", width, 2 * width};
  out["proj_out"] = {"final_layer.linear"};
  out["x_embedder"] = {"img_in"};
  out["context_embedder"] = {"txt_in"};
  for (const auto& [ours, theirs] : {std::pair{"timestep_embedder", "time_in"},
                                     {"guidance_embedder", "guidance_in"},
                                     {"text_embedder", "vector_in"}}) {
    out[fmt::format("time_text_embed.{}.linear_1", ours)] = {fmt::format("{}.in_layer", theirs)};
    out[fmt::format("time_text_embed.{}.linear_2", ours)] = {fmt::format("{}.out_layer", theirs)};
  }
  for (int64_t block = 0; block < config.n_double; ++block) add_double(block, width, out);
  for (int64_t block = 0; block < config.n_single; ++block) add_single(block, config, out);
  return out;
}

std::vector<TensorShape> tensor_shapes(const Config& config) {
  const int64_t width = config.width();
  Shapes out;
  out.linear("x_embedder", width, config.in_channels);
  out.linear("context_embedder", width, config.text_dim);
  const auto embedder = [&](const std::string& name, int64_t inputs) {
    out.linear("time_text_embed." + name + ".linear_1", width, inputs);
    out.linear("time_text_embed." + name + ".linear_2", width, width);
  };
  embedder("timestep_embedder", kTimeFrequencies);
  if (config.guidance) embedder("guidance_embedder", kTimeFrequencies);
  embedder("text_embedder", config.pooled_dim);
  for (int64_t block = 0; block < config.n_double; ++block) {
    const std::string prefix = fmt::format("transformer_blocks.{}.", block);
    for (const StreamNames& stream : kStreams) {
      out.linear(prefix + stream.modulation, 6 * width, width);
      for (const char* name : stream.qkv) out.linear(prefix + name, width, width);
      for (const char* name : stream.norm) out.vector(prefix + name + ".weight", config.head_dim);
      out.linear(prefix + stream.out, width, width);
      if (config.moe.n_experts > 0 && &stream == &kStreams[0])
        out.experts(prefix + stream.mlp, config);
      else
        out.mlp(prefix + stream.mlp, width, config.mlp_width);
    }
  }
  for (int64_t block = 0; block < config.n_single; ++block) {
    const std::string prefix = fmt::format("single_transformer_blocks.{}.", block);
    out.linear(prefix + "norm.linear", 3 * width, width);
    for (const char* name : kStreams[0].qkv) out.linear(prefix + name, width, width);
    for (const char* name : kStreams[0].norm) out.vector(prefix + name + ".weight", config.head_dim);
    if (config.moe.n_experts > 0) {
      out.linear(prefix + "proj_out", width, width);
      out.experts(prefix + "ff", config);
    } else {
      out.linear(prefix + "proj_mlp", config.mlp_width, width);
      out.linear(prefix + "proj_out", width, width + config.mlp_width);
    }
  }
  out.linear("norm_out.linear", 2 * width, width);
  out.linear("proj_out", config.out_channels, width);
  return out.take();
}

}  // namespace lacuna::model::flux
