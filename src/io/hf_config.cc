#include "io/hf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "io/json.h"

namespace lacuna::io {

namespace {

using nlohmann::json;

struct Family {
  std::string_view model_type, architecture, class_name;
  bool tied_by_default;  // transformers' value where config.json names none
};
constexpr Family kFamilies[] = {{"llama", "llama", "LlamaForCausalLM", false},
                                {"mistral", "llama", "MistralForCausalLM", false},
                                {"qwen2", "qwen2", "Qwen2ForCausalLM", false},
                                {"qwen3", "qwen3", "Qwen3ForCausalLM", false},
                                {"opt", "opt", "OPTForCausalLM", true}};

// Keys that change what a model computes and that nothing here computes; null, false and 0 mean "not used".
constexpr const char* kUnsupported[] = {"num_experts",
                                        "num_local_experts",
                                        "n_routed_experts",
                                        "moe_intermediate_size",
                                        "clip_qkv",
                                        "attn_logit_softcapping",
                                        "final_logit_softcapping",
                                        "embedding_multiplier",
                                        "residual_multiplier",
                                        "attention_multiplier",
                                        "logits_scaling",
                                        "query_pre_attn_scalar",
                                        "qk_layernorm",
                                        "attention_sink",
                                        "is_encoder_decoder",
                                        "add_cross_attention",
                                        "vision_config",
                                        "text_config",
                                        "attention_chunk_size",
                                        "no_rope_layers"};

class Reader {
 public:
  Reader(const json& config, const std::string& where) : in_(config, where), where_(where) {}

  HfConfig read() {
    find_family();
    for (const char* key : kUnsupported) {
      if (is_set(key)) throw Error("{}: \"{}\" is set, which this program does not support", where_, key);
    }
    for (const char* key : {"compression_config", "quantization_config"}) {
      if (!is_set(key)) continue;
      out_.quantization = *in_.object(key);
      out_.quantization_key = key;
    }
    out_.block_count = positive("num_hidden_layers");
    out_.vocab_size = positive("vocab_size");
    out_.tied = in_.boolean("tie_word_embeddings").value_or(family_->tied_by_default);
    set("general.architecture", out_.architecture);
    set_count("block_count", out_.block_count);
    set_count("context_length", positive("max_position_embeddings"));
    set_count("embedding_length", positive("hidden_size"));
    set_count("vocab_size", out_.vocab_size);
    if (out_.architecture == "opt")
      read_opt();
    else
      read_rotary();
    return std::move(out_);
  }

 private:
  /// Neither absent nor null, false or 0.
  bool is_set(const char* key) const {
    const json* value = in_.find(key);
    return value != nullptr && *value != json(false) && *value != json(0);
  }

  void find_family() {
    const std::string type = in_.need_string("model_type");
    for (const Family& family : kFamilies)
      if (family.model_type == type) family_ = &family;
    if (family_ == nullptr) {
      std::string known;
      for (const Family& family : kFamilies) known += fmt::format("{}{}", known.empty() ? "" : ", ", family.model_type);
      throw Error("{}: unknown model_type \"{}\"; known are {}", where_, type, known);
    }
    if (const json* classes = in_.array("architectures")) {
      if (classes->size() != 1 || (*classes)[0] != json(family_->class_name))
        throw Error("{}: architectures is {}; for model_type \"{}\" only [\"{}\"] is supported", where_,
                    classes->dump(), type, family_->class_name);
    }
    out_.model_type = family_->model_type;
    out_.architecture = family_->architecture;
  }

  void read_opt() {
    set_count("feed_forward_length", positive("ffn_dim"));
    const int64_t width = positive("hidden_size"), heads = positive("num_attention_heads");
    check_heads(width, heads);
    set_count("attention.head_count", heads);
    set_count("attention.head_count_kv", heads);
    set("opt.attention.layer_norm_epsilon", 1e-5f);
    set_count("position_offset", 2);
    set_count("word_embed_proj_dim", in_.find("word_embed_proj_dim") ? positive("word_embed_proj_dim") : width);
    const std::string activation = in_.string("activation_function").value_or("relu");
    if (activation != "relu")
      throw Error("{}: activation_function \"{}\" is not supported; known is relu", where_, activation);
    set("opt.activation_function", activation);
    if (!in_.boolean("layer_norm_elementwise_affine").value_or(true))
      throw Error("{}: layer_norm_elementwise_affine false is not supported", where_);
    const bool before = in_.boolean("do_layer_norm_before").value_or(true);
    set("opt.do_layer_norm_before", before);
    set("opt.final_layer_norm", before && !in_.boolean("_remove_final_layer_norm").value_or(false));
  }

  void read_rotary() {
    set_count("feed_forward_length", positive("intermediate_size"));
    const int64_t width = positive("hidden_size"), heads = positive("num_attention_heads");
    const int64_t kv_heads = in_.find("num_key_value_heads") ? positive("num_key_value_heads") : heads;
    if (heads % kv_heads != 0)
      throw Error("{}: num_attention_heads = {} is no multiple of num_key_value_heads = {}", where_, heads, kv_heads);
    set_count("attention.head_count", heads);
    set_count("attention.head_count_kv", kv_heads);
    int64_t head_dim = 0;
    if (in_.find("head_dim")) {
      head_dim = positive("head_dim");
      set_count("attention.key_length", head_dim);
      set_count("attention.value_length", head_dim);
    } else {
      check_heads(width, heads);
      head_dim = width / heads;
    }
    if (head_dim % 2 != 0) throw Error("{}: the head size {} is odd; rotary embedding turns pairs", where_, head_dim);
    const std::string activation = in_.string("hidden_act").value_or("silu");
    if (activation != "silu") throw Error("{}: hidden_act \"{}\" is not supported; known is silu", where_, activation);
    const auto epsilon = in_.number("rms_norm_eps");
    if (!epsilon || !(*epsilon > 0) || !std::isfinite(*epsilon))
      throw Error("{}: rms_norm_eps must be a positive number", where_);
    set(key("attention.layer_norm_rms_epsilon"), float(*epsilon));
    set_count("rope.dimension_count", head_dim);
    read_rope();
    read_window();
  }

  void check_heads(int64_t width, int64_t heads) const {
    if (width % heads != 0)
      throw Error("{}: hidden_size = {} is no multiple of num_attention_heads = {}, and there is no head_dim", where_,
                  width, heads);
  }

  /// transformers 5 writes rope_parameters; before, rope_theta stood beside rope_scaling. Where both are there,
  /// transformers takes rope_scaling unless it is empty.
  void read_rope() {
    const json* rope = in_.object("rope_scaling");
    const json* parameters_of_5 = in_.object("rope_parameters");
    if (rope == nullptr || rope->empty()) rope = parameters_of_5;
    static const json kNone = json::object();
    const std::string where = where_ + ": rope parameters";
    const JsonObject parameters(rope != nullptr ? *rope : kNone, where);
    if (parameters.find("full_attention") != nullptr || parameters.find("sliding_attention") != nullptr)
      throw Error("{}: different rope parameters for different layers are not supported", where);
    if (parameters.number("partial_rotary_factor").value_or(in_.number("partial_rotary_factor").value_or(1.0)) != 1.0)
      throw Error("{}: partial_rotary_factor is not supported", where);
    auto theta = parameters.number("rope_theta");
    if (!theta) theta = in_.number("rope_theta");
    set(key("rope.freq_base"), float(checked_positive(theta.value_or(10000.0), "rope_theta", where)));

    auto type = parameters.string("rope_type");
    if (!type) type = parameters.string("type");  // the older spelling
    if (!type || *type == "default") {
      if (!type && parameters.find("factor") != nullptr) throw Error("{}: a factor without a rope_type", where);
      return;
    }
    if (*type != "linear" && *type != "llama3" && *type != "yarn")
      throw Error("{}: rope_type \"{}\" is not supported; known are default, linear, llama3, yarn", where, *type);
    const auto need = [&](const char* name) {
      const auto value = parameters.number(name);
      if (!value) throw Error("{}: \"{}\" is missing, rope_type \"{}\" needs it", where, name, *type);
      return float(checked_positive(*value, name, where));
    };
    set(key("rope.scaling.type"), *type);
    set(key("rope.scaling.factor"), need("factor"));
    if (*type == "linear") return;
    const auto original = parameters.integer("original_max_position_embeddings");
    if (!original && *type == "llama3") need("original_max_position_embeddings");
    const int64_t context = original.value_or(positive("max_position_embeddings"));
    if (context < 1) throw Error("{}: original_max_position_embeddings = {} must be positive", where, context);
    set_count("rope.scaling.original_context_length", context);
    if (*type == "llama3") {
      const float low = need("low_freq_factor"), high = need("high_freq_factor");
      if (!(low < high)) throw Error("{}: low_freq_factor {} must be less than high_freq_factor {}", where, low, high);
      set(key("rope.scaling.low_freq_factor"), low);
      set(key("rope.scaling.high_freq_factor"), high);
      return;
    }
    for (const char* name : {"mscale", "mscale_all_dim"})
      if (parameters.find(name) != nullptr) throw Error("{}: \"{}\" of yarn is not supported", where, name);
    if (!parameters.boolean("truncate").value_or(true))
      throw Error("{}: \"truncate\": false of yarn is not supported", where);
    if (parameters.find("attention_factor")) {
      // GGUF's key multiplies the usual factor, which Hugging Face's replaces.
      const double factor = need("factor"), usual = factor > 1 ? 0.1 * std::log(factor) + 1 : 1.0;
      set(key("rope.scaling.yarn_attn_factor"), float(double(need("attention_factor")) / usual));
    }
    if (parameters.find("beta_fast")) set(key("rope.scaling.yarn_beta_fast"), need("beta_fast"));
    if (parameters.find("beta_slow")) set(key("rope.scaling.yarn_beta_slow"), need("beta_slow"));
  }

  void read_window() {
    const auto window = in_.integer("sliding_window");
    const bool qwen = family_->model_type.starts_with("qwen");
    if (!window || *window == 0) return;
    if (*window < 0) throw Error("{}: sliding_window = {} must be positive", where_, *window);
    if (family_->model_type == "llama") return;  // LlamaModel reads no such key
    if (qwen && !in_.boolean("use_sliding_window").value_or(false)) return;
    int64_t with_window = out_.block_count;
    if (const json* types = in_.array("layer_types")) {
      if (int64_t(types->size()) != out_.block_count)
        throw Error("{}: layer_types has {} entries for {} layers", where_, types->size(), out_.block_count);
      with_window = std::count(types->begin(), types->end(), json("sliding_attention"));
      if (with_window + std::count(types->begin(), types->end(), json("full_attention")) != out_.block_count)
        throw Error("{}: layer_types may hold only full_attention and sliding_attention", where_);
    } else if (qwen) {  // layers from max_window_layers on have the window
      const int64_t full = std::clamp<int64_t>(in_.need_integer("max_window_layers"), 0, out_.block_count);
      with_window = out_.block_count - full;
    }
    if (with_window == 0) return;
    if (with_window != out_.block_count)
      throw Error("{}: a sliding window in {} of {} layers is not supported; all or none", where_, with_window,
                  out_.block_count);
    set_count("attention.sliding_window", *window);
  }

  std::string key(std::string_view name) const { return fmt::format("{}.{}", out_.architecture, name); }
  void set(std::string name, MetadataValue value) { out_.metadata.set(std::move(name), std::move(value)); }
  void set_count(std::string_view name, int64_t value) {
    if (value < 0 || value > std::numeric_limits<uint32_t>::max())
      throw Error("{}: {} = {} does not fit 32 bits", where_, name, value);
    set(key(name), uint32_t(value));
  }
  int64_t positive(const char* name) const {
    const int64_t value = in_.need_integer(name);
    if (value < 1 || value > std::numeric_limits<int32_t>::max())
      throw Error("{}: \"{}\" = {} must lie between 1 and 2^31 - 1", where_, name, value);
    return value;
  }
  static double checked_positive(double value, const char* name, const std::string& where) {
    if (!(value > 0) || !std::isfinite(float(value)))
      throw Error("{}: \"{}\" = {} must be a positive number", where, name, value);
    return value;
  }

  JsonObject in_;
  const std::string& where_;
  const Family* family_ = nullptr;
  HfConfig out_;
};

}  // namespace

HfConfig read_hf_config(std::string_view text, const std::string& where) {
  const json config = parse_json_object(text, where);
  HfConfig out = Reader(config, where).read();
  if (!out.quantization.is_null())
    out.quantization_rules = json_keys(text, std::array<std::string_view, 2>{out.quantization_key, "dynamic"});
  return out;
}

}  // namespace lacuna::io
