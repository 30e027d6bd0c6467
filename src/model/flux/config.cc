#include "model/flux/config.h"

#include <numeric>
#include <string_view>

#include "core/error.h"
#include "io/json.h"

namespace lacuna::model::flux {

namespace {

constexpr int64_t kMaxSize = int64_t{1} << 24;
constexpr const char* kClass = "FluxTransformer2DModel";
constexpr double kMlpRatio = 4.0;

int64_t size_of(const io::JsonObject& json, const char* key, int64_t absent, const std::string& where) {
  const int64_t value = json.integer(key).value_or(absent);
  if (value < 1 || value > kMaxSize)
    throw Error("{}: {} = {}, expected a whole number from 1 to {}", where, key, value, kMaxSize);
  return value;
}

/// Layers may be none of one kind.
int64_t layers_of(const io::JsonObject& json, const char* key, int64_t absent, const std::string& where) {
  const int64_t value = json.integer(key).value_or(absent);
  if (value < 0 || value > 4096) throw Error("{}: {} = {}, expected a whole number from 0 to 4096", where, key, value);
  return value;
}

void read_moe(const io::JsonObject& json, const std::string& where, MoeConfig& moe) {
  moe.n_experts = json.integer("moe_num_experts").value_or(0);
  if (moe.n_experts == 0) return;
  moe.n_experts = size_of(json, "moe_num_experts", 0, where);
  moe.top_k = size_of(json, "moe_top_k", 0, where);
  moe.width = size_of(json, "moe_intermediate_size", 0, where);
  moe.normalize = json.boolean("moe_norm_topk_prob").value_or(true);
}

/// Layers `prefix`0, `prefix`1, ... that a file has.
int64_t count_layers(const io::ImageCheckpoint& checkpoint, std::string_view prefix, std::string_view tensor) {
  int64_t n = 0;
  while (checkpoint.find(fmt::format("{}{}.{}", prefix, n, tensor)) != nullptr) ++n;
  return n;
}

const io::Tensor& require(const io::ImageCheckpoint& checkpoint, const std::string& name) {
  if (const io::Tensor* tensor = checkpoint.find(name)) return *tensor;
  throw Error("{}: tensor {} is missing, and there is no config.json", checkpoint.path(), name);
}

Config infer(const io::ImageCheckpoint& checkpoint) {
  Config out;
  const io::Tensor& in = require(checkpoint, "img_in.weight");
  out.in_channels = in.shape.K;
  const int64_t width = in.shape.N;
  out.n_double = count_layers(checkpoint, "double_blocks.", "img_attn.qkv.weight");
  out.n_single = count_layers(checkpoint, "single_blocks.", "linear1.weight");
  const std::string norm =
      out.n_double > 0 ? "double_blocks.0.img_attn.norm.query_norm.scale" : "single_blocks.0.norm.query_norm.scale";
  out.head_dim = require(checkpoint, norm).shape.K;
  const int64_t known = std::accumulate(out.rope_axes.begin(), out.rope_axes.end(), int64_t{0});
  if (out.head_dim != known)
    throw Error(
        "{}: tensor {} says that heads have {} values; without a config.json the rope axes are known for {} only, put "
        "the file in a folder with one that has axes_dims_rope",
        checkpoint.path(), norm, out.head_dim, known);
  if (width % out.head_dim != 0)
    throw Error("{}: tensor {} has {} rows, no multiple of the head size {}", checkpoint.path(), in.name, width,
                out.head_dim);
  out.n_heads = width / out.head_dim;
  out.text_dim = require(checkpoint, "txt_in.weight").shape.K;
  out.pooled_dim = require(checkpoint, "vector_in.in_layer.weight").shape.K;
  out.out_channels = require(checkpoint, "final_layer.linear.weight").shape.N;
  out.guidance = checkpoint.find("guidance_in.in_layer.weight") != nullptr;
  out.mlp_width = out.n_double > 0 ? require(checkpoint, "double_blocks.0.img_mlp.0.weight").shape.N
                                   : require(checkpoint, "single_blocks.0.linear1.weight").shape.N - 3 * width;
  if (out.mlp_width < 1)
    throw Error("{}: single_blocks.0.linear1.weight has {} rows, but q, k and v alone take {}", checkpoint.path(),
                out.mlp_width + 3 * width, 3 * width);
  check_config(out, checkpoint.path());
  return out;
}

}  // namespace

void check_config(const Config& config, const std::string& where) {
  for (const int64_t axis : config.rope_axes)
    if (axis < 2 || axis % 2 != 0)
      throw Error("{}: axes_dims_rope holds {}, expected even numbers from 2 on", where, axis);
  const int64_t sum = std::accumulate(config.rope_axes.begin(), config.rope_axes.end(), int64_t{0});
  if (sum != config.head_dim)
    throw Error("{}: axes_dims_rope add up to {}, but a head has {} values (attention_head_dim)", where, sum,
                config.head_dim);
  if (config.n_double + config.n_single == 0)
    throw Error("{}: no blocks: num_layers and num_single_layers are both 0", where);
  if (config.width() > kMaxSize)
    throw Error("{}: {} heads of {} values are more than {}", where, config.n_heads, config.head_dim, kMaxSize);
  if (config.moe.n_experts > 0 && config.moe.top_k > config.moe.n_experts)
    throw Error("{}: moe_top_k = {}, but there are only {} experts (moe_num_experts)", where, config.moe.top_k,
                config.moe.n_experts);
}

Config parse_config(const std::string& text, const std::string& where) {
  const nlohmann::json whole = io::parse_json_object(text, where);
  const io::JsonObject json(whole, where);
  if (const auto name = json.string("_class_name"); name && *name != kClass)
    throw Error("{}: _class_name is {}; only {} is run", where, *name, kClass);
  if (const int64_t patch = json.integer("patch_size").value_or(1); patch != 1)
    throw Error("{}: patch_size = {}; only 1 is run (latents are packed before they come in)", where, patch);
  if (const double ratio = json.number("mlp_ratio").value_or(kMlpRatio); ratio != kMlpRatio)
    throw Error("{}: mlp_ratio = {}; only {} is run", where, ratio, kMlpRatio);
  const Config usual;
  Config out;
  out.in_channels = size_of(json, "in_channels", usual.in_channels, where);
  out.out_channels = size_of(json, "out_channels", out.in_channels, where);
  out.n_double = layers_of(json, "num_layers", usual.n_double, where);
  out.n_single = layers_of(json, "num_single_layers", usual.n_single, where);
  out.n_heads = size_of(json, "num_attention_heads", usual.n_heads, where);
  out.head_dim = size_of(json, "attention_head_dim", usual.head_dim, where);
  out.text_dim = size_of(json, "joint_attention_dim", usual.text_dim, where);
  out.pooled_dim = size_of(json, "pooled_projection_dim", usual.pooled_dim, where);
  out.guidance = json.boolean("guidance_embeds").value_or(false);
  if (const nlohmann::json* axes = json.array("axes_dims_rope")) {
    out.rope_axes.clear();
    for (const nlohmann::json& axis : *axes) {
      if (!axis.is_number_integer() || axis.get<int64_t>() > kMaxSize)
        throw Error("{}: axes_dims_rope must hold whole numbers up to {}, found {}", where, kMaxSize, axis.dump());
      out.rope_axes.push_back(axis.get<int64_t>());
    }
  }
  read_moe(json, where, out.moe);
  check_config(out, where);
  out.mlp_width = int64_t(kMlpRatio) * out.width();
  return out;
}

std::string format_config(const Config& config) {
  nlohmann::ordered_json out = {{"_class_name", kClass},
                                {"patch_size", 1},
                                {"in_channels", config.in_channels},
                                {"out_channels", config.out_channels},
                                {"num_layers", config.n_double},
                                {"num_single_layers", config.n_single},
                                {"num_attention_heads", config.n_heads},
                                {"attention_head_dim", config.head_dim},
                                {"joint_attention_dim", config.text_dim},
                                {"pooled_projection_dim", config.pooled_dim},
                                {"guidance_embeds", config.guidance},
                                {"axes_dims_rope", config.rope_axes}};
  if (config.moe.n_experts > 0) {
    out["moe_num_experts"] = config.moe.n_experts;
    out["moe_top_k"] = config.moe.top_k;
    out["moe_intermediate_size"] = config.moe.width;
    out["moe_norm_topk_prob"] = config.moe.normalize;
  }
  return out.dump(2) + "\n";
}

Naming naming_of(const io::ImageCheckpoint& checkpoint) {
  if (checkpoint.find("x_embedder.weight") != nullptr) return Naming::diffusers;
  if (checkpoint.find("img_in.weight") != nullptr) return Naming::original;
  throw Error(
      "{}: no FLUX.1 transformer: it has neither the tensor x_embedder.weight (diffusers' naming) nor img_in.weight "
      "(the first release's)",
      checkpoint.path());
}

Config read_config(const io::ImageCheckpoint& checkpoint) {
  if (!checkpoint.config().empty()) return parse_config(checkpoint.config(), checkpoint.config_path());
  if (naming_of(checkpoint) == Naming::diffusers)
    throw Error("{}: a file in diffusers' naming needs its config.json; name the folder that has both",
                checkpoint.path());
  return infer(checkpoint);
}

}  // namespace lacuna::model::flux
