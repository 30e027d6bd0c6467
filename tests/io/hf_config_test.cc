#include "io/hf_config.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "core/mapped_file.h"
#include "gguf_bytes.h"
#include "io/gguf.h"
#include "test_support.h"

namespace lacuna::io {
namespace {

using nlohmann::json;

json llama() {
  return json::parse(R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_act":"silu","hidden_size":32,
    "intermediate_size":64,"max_position_embeddings":128,"num_attention_heads":4,"num_hidden_layers":2,
    "num_key_value_heads":2,"rms_norm_eps":1e-5,"vocab_size":48})");
}
json with(json config, std::string_view changes) {
  config.merge_patch(json::parse(changes));  // null removes a key
  return config;
}
HfConfig read(const json& config) { return read_hf_config(config.dump(), "config.json"); }

// What llama.cpp's converter writes for the same checkpoint (the fixtures' authors wrote its keys with the gguf
// package).
TEST(HfConfig, AgreesWithTheConverterOnEveryFixture) {
  for (const char* name : {"llama_mha", "llama_gqa_rope_llama3", "llama_rope_linear", "llama_rope_yarn", "llama_tied",
                           "llama_head_dim", "llama_odd_heads", "llama_bias", "mistral", "mistral_sliding_window",
                           "qwen2", "qwen2_untied", "qwen3", "qwen3_untied"}) {
    SCOPED_TRACE(name);
    const HfConfig config =
        read_hf_config(test::read_text(test::fixture(std::string("hf/") + name + "/config.json")), "config.json");
    const MappedFile mapped(test::fixture(std::string("gguf_models/") + name + ".gguf"));
    const GgufFile gguf = parse_gguf(mapped.bytes(), name);
    const std::string prefix = config.architecture + ".";
    int compared = 0;
    for (const auto& [key, value] : gguf.metadata.entries()) {
      if (!key.starts_with(prefix) && key != "general.architecture") continue;
      // Values that transformers fills in by itself where config.json is silent.
      const MetadataValue* found = config.metadata.find(key);
      if (found == nullptr) {
        const bool implied = key == prefix + "attention.key_length" || key == prefix + "attention.value_length";
        EXPECT_TRUE(implied) << key;
        continue;
      }
      EXPECT_TRUE(*found == value) << key;
      ++compared;
    }
    EXPECT_GE(compared, 8);
    for (const auto& [key, value] : config.metadata.entries()) {
      if (gguf.metadata.contains(key)) continue;
      const std::string_view rest = std::string_view(key).substr(prefix.size());
      const bool extra = rest == "vocab_size" || rest == "rope.dimension_count" || rest == "rope.freq_base" ||
                         rest == "attention.head_count_kv" ||
                         (std::string_view(name) == "llama_gqa_rope_llama3" && rest.starts_with("rope.scaling."));
      EXPECT_TRUE(extra) << key;
    }
  }
}

TEST(HfConfig, Llama3ScalingKeepsItsFourNumbers) {
  const HfConfig config =
      read_hf_config(test::read_text(test::fixture("hf/llama_gqa_rope_llama3/config.json")), "config.json");
  const Metadata& m = config.metadata;
  EXPECT_EQ(m.string("llama.rope.scaling.type"), "llama3");
  EXPECT_EQ(m.number("llama.rope.scaling.factor"), 8.0);
  EXPECT_EQ(m.number("llama.rope.scaling.low_freq_factor"), 1.0);
  EXPECT_EQ(m.number("llama.rope.scaling.high_freq_factor"), 4.0);
  EXPECT_EQ(m.integer("llama.rope.scaling.original_context_length"), 64);
}

TEST(HfConfig, BothSpellingsOfRope) {
  const Metadata old =
      read(with(llama(), R"({"rope_theta":5e5,"rope_scaling":{"type":"linear","factor":4}})")).metadata;
  const Metadata modern =
      read(with(llama(), R"({"rope_parameters":{"rope_theta":5e5,"rope_type":"linear","factor":4.0}})")).metadata;
  EXPECT_EQ(old.entries(), modern.entries());
  EXPECT_EQ(old.number("llama.rope.freq_base"), 5e5);
  EXPECT_EQ(old.number("llama.rope.scaling.factor"), 4.0);
  const Metadata none = read(llama()).metadata;
  EXPECT_EQ(none.number("llama.rope.freq_base"), 10000.0);
  EXPECT_FALSE(none.contains("llama.rope.scaling.type"));
}

// As transformers does it: rope_scaling, unless it is empty.
TEST(HfConfig, RopeScalingWinsOverRopeParameters) {
  const auto both = [](std::string_view scaling) {
    return read(with(llama(), fmt::format(R"({{"rope_theta":5e5,"rope_scaling":{},"rope_parameters":)"
                                          R"({{"rope_theta":7e5,"rope_type":"linear","factor":8}}}})",
                                          scaling)))
        .metadata;
  };
  const Metadata scaled = both(R"({"type":"linear","factor":4})");
  EXPECT_EQ(scaled.number("llama.rope.scaling.factor"), 4.0);
  EXPECT_EQ(scaled.number("llama.rope.freq_base"), 5e5);
  for (const char* none : {"{}", "null"}) {
    EXPECT_EQ(both(none).number("llama.rope.scaling.factor"), 8.0) << none;
    EXPECT_EQ(both(none).number("llama.rope.freq_base"), 7e5) << none;
  }
  EXPECT_ERROR(both("5"), "\"rope_scaling\" must be an object");
}

TEST(HfConfig, RopeErrors) {
  const auto rope = [](std::string_view parameters) {
    return read(with(llama(), fmt::format(R"({{"rope_parameters":{}}})", parameters)));
  };
  EXPECT_ERROR(rope(R"({"rope_type":"longrope","factor":2})"),
               "\"longrope\" is not supported; known are default, linear, llama3, yarn");
  EXPECT_ERROR(rope(R"({"rope_type":"dynamic","factor":2})"), "\"dynamic\" is not supported");
  EXPECT_ERROR(rope(R"({"rope_type":"linear"})"), "\"factor\" is missing");
  EXPECT_ERROR(rope(R"({"rope_type":"linear","factor":0})"), "must be a positive number");
  EXPECT_ERROR(rope(R"({"rope_type":"linear","factor":1e300})"), "must be a positive number");
  EXPECT_ERROR(rope(R"({"factor":2})"), "a factor without a rope_type");
  EXPECT_ERROR(rope(R"({"rope_theta":-1})"), "\"rope_theta\" = -1");
  EXPECT_ERROR(rope(R"({"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4})"),
               "\"original_max_position_embeddings\" is missing");
  EXPECT_ERROR(
      rope(
          R"({"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4,"original_max_position_embeddings":8})"),
      "must be less than");
  EXPECT_ERROR(rope(R"({"rope_type":"yarn","factor":8,"mscale":1})"), "\"mscale\" of yarn");
  EXPECT_ERROR(rope(R"({"rope_type":"yarn","factor":8,"truncate":false})"), "truncate");
  EXPECT_ERROR(rope(R"({"partial_rotary_factor":0.5})"), "partial_rotary_factor");
  EXPECT_ERROR(rope(R"({"full_attention":{"rope_theta":1}})"), "different rope parameters for different layers");
  const Metadata yarn =
      rope(R"({"rope_type":"yarn","factor":8,"attention_factor":1.5,"beta_fast":16,"beta_slow":2})").metadata;
  EXPECT_FLOAT_EQ(float(yarn.number("llama.rope.scaling.yarn_attn_factor").value()),
                  float(1.5 / (1 + 0.1 * std::log(8))));
  EXPECT_EQ(yarn.number("llama.rope.scaling.yarn_beta_fast"), 16.0);
  EXPECT_EQ(yarn.number("llama.rope.scaling.yarn_beta_slow"), 2.0);
  EXPECT_EQ(yarn.integer("llama.rope.scaling.original_context_length"), 128);
}

TEST(HfConfig, UnknownModelsListTheKnownOnes) {
  EXPECT_ERROR(read(with(llama(), R"({"model_type":"gemma2"})")),
               "unknown model_type \"gemma2\"; known are llama, mistral, qwen2, qwen3, opt");
  EXPECT_ERROR(read(with(llama(), R"({"model_type":null})")), "\"model_type\" is missing");
  EXPECT_ERROR(read(with(llama(), R"({"architectures":["LlamaForSequenceClassification"]})")),
               "only [\"LlamaForCausalLM\"] is supported");
  EXPECT_NO_THROW(read(with(llama(), R"({"architectures":null})")));
  EXPECT_ERROR(read_hf_config("[]", "config.json"), "config.json: expected a JSON object");
}

TEST(HfConfig, OptionsThatChangeTheResultAreRefused) {
  for (const char* key : {"num_experts", "num_local_experts", "clip_qkv", "embedding_multiplier", "text_config"}) {
    json config = llama();
    config[key] = 8;
    EXPECT_ERROR(read(config), fmt::format("\"{}\" is set, which this program does not support", key));
    config[key] = nullptr;
    EXPECT_NO_THROW(read(config));
  }
  EXPECT_ERROR(read(with(llama(), R"({"hidden_act":"gelu"})")), "hidden_act \"gelu\" is not supported; known is silu");
}

TEST(HfConfig, QuantizationIsHandedOn) {
  EXPECT_TRUE(read(llama()).quantization.is_null());
  EXPECT_TRUE(read(with(llama(), R"({"quantization_config":null})")).quantization.is_null());
  for (const char* key : {"quantization_config", "compression_config"}) {
    json config = llama();
    config[key] = {{"quant_method", "awq"}};
    EXPECT_EQ(read(config).quantization["quant_method"], "awq");
    EXPECT_EQ(read(config).quantization_key, key);
    config[key] = 8;
    EXPECT_ERROR(read(config), fmt::format("\"{}\" must be an object", key));
  }
}

TEST(HfConfig, SizesAreChecked) {
  EXPECT_ERROR(read(with(llama(), R"({"hidden_size":null})")), "\"hidden_size\" is missing");
  EXPECT_ERROR(read(with(llama(), R"({"hidden_size":0})")), "must lie between 1 and");
  EXPECT_ERROR(read(with(llama(), R"({"hidden_size":-8})")), "must lie between 1 and");
  EXPECT_ERROR(read(with(llama(), R"({"hidden_size":1e3})")), "must be an integer");
  EXPECT_ERROR(read(with(llama(), R"({"num_hidden_layers":4294967296})")), "must lie between 1 and");
  EXPECT_ERROR(read(with(llama(), R"({"num_key_value_heads":3})")), "no multiple of num_key_value_heads");
  EXPECT_ERROR(read(with(llama(), R"({"hidden_size":33})")), "no multiple of num_attention_heads");
  EXPECT_ERROR(read(with(llama(), R"({"head_dim":7})")), "is odd");
  EXPECT_ERROR(read(with(llama(), R"({"rms_norm_eps":null})")), "rms_norm_eps");
  EXPECT_ERROR(read(with(llama(), R"({"rms_norm_eps":-1})")), "rms_norm_eps");
}

TEST(HfConfig, SlidingWindowOnlyWhereUsed) {
  const auto window = [](const json& config) {
    const HfConfig read_config = read(config);
    return read_config.metadata.integer(read_config.architecture + ".attention.sliding_window");
  };
  const json mistral = with(llama(), R"({"model_type":"mistral","architectures":["MistralForCausalLM"]})");
  EXPECT_EQ(window(with(mistral, R"({"sliding_window":16})")), 16);
  EXPECT_EQ(window(mistral), std::nullopt);
  EXPECT_EQ(window(with(llama(), R"({"sliding_window":16})")), std::nullopt);
  EXPECT_ERROR(window(with(mistral, R"({"sliding_window":-1})")), "sliding_window = -1");
  const json qwen = with(llama(), R"({"model_type":"qwen2","architectures":["Qwen2ForCausalLM"],"sliding_window":16})");
  EXPECT_EQ(window(qwen), std::nullopt);
  EXPECT_EQ(window(with(qwen, R"({"use_sliding_window":false,"max_window_layers":0})")), std::nullopt);
  EXPECT_EQ(window(with(qwen, R"({"use_sliding_window":true,"max_window_layers":0})")), 16);
  EXPECT_EQ(window(with(qwen, R"({"use_sliding_window":true,"max_window_layers":2})")), std::nullopt);
  EXPECT_ERROR(window(with(qwen, R"({"use_sliding_window":true,"max_window_layers":1})")),
               "in 1 of 2 layers is not supported");
  EXPECT_ERROR(
      window(with(qwen, R"({"use_sliding_window":true,"layer_types":["full_attention","sliding_attention"]})")),
      "in 1 of 2 layers");
  EXPECT_EQ(window(with(qwen, R"({"use_sliding_window":true,"layer_types":["full_attention","full_attention"]})")),
            std::nullopt);
  EXPECT_ERROR(window(with(qwen, R"({"use_sliding_window":true,"layer_types":["x","full_attention"]})")),
               "layer_types may hold only");
}

TEST(HfConfig, Opt) {
  const auto opt = [](const char* name) {
    return read_hf_config(test::read_text(test::fixture(std::string("hf/") + name + "/config.json")), "config.json");
  };
  const HfConfig plain = opt("opt");
  EXPECT_EQ(plain.architecture, "opt");
  EXPECT_TRUE(plain.tied);
  const Metadata& m = plain.metadata;
  EXPECT_EQ(m.integer("opt.block_count"), 2);
  EXPECT_EQ(m.integer("opt.context_length"), 40);
  EXPECT_EQ(m.integer("opt.embedding_length"), 18);
  EXPECT_EQ(m.integer("opt.feed_forward_length"), 28);
  EXPECT_EQ(m.integer("opt.attention.head_count"), 3);
  EXPECT_EQ(m.number("opt.attention.layer_norm_epsilon"), double(1e-5f));
  EXPECT_EQ(m.integer("opt.position_offset"), 2);
  EXPECT_EQ(m.integer("opt.word_embed_proj_dim"), 18);
  EXPECT_EQ(m.boolean("opt.do_layer_norm_before"), true);
  EXPECT_EQ(m.boolean("opt.final_layer_norm"), true);
  EXPECT_EQ(m.string("opt.activation_function"), "relu");
  const HfConfig post = opt("opt_post_norm_projected");
  EXPECT_EQ(post.metadata.integer("opt.word_embed_proj_dim"), 12);
  EXPECT_EQ(post.metadata.boolean("opt.do_layer_norm_before"), false);
  EXPECT_EQ(post.metadata.boolean("opt.final_layer_norm"), false);

  const json base = json::parse(test::read_text(test::fixture("hf/opt/config.json")));
  EXPECT_ERROR(read(with(base, R"({"activation_function":"gelu"})")), "activation_function \"gelu\"");
  EXPECT_ERROR(read(with(base, R"({"layer_norm_elementwise_affine":false})")), "layer_norm_elementwise_affine");
  EXPECT_EQ(read(with(base, R"({"_remove_final_layer_norm":true})")).metadata.boolean("opt.final_layer_norm"), false);
}

}  // namespace
}  // namespace lacuna::io
