#include "io/hf_names.h"

#include "gguf_bytes.h"

namespace lacuna::io {
namespace {

std::string name(std::string_view hf, std::string_view architecture = "llama") {
  return gguf_tensor_name(architecture, 12, hf, "m");
}

TEST(HfNames, RotaryFamilies) {
  EXPECT_EQ(name("model.embed_tokens.weight"), "token_embd.weight");
  EXPECT_EQ(name("model.norm.weight"), "output_norm.weight");
  EXPECT_EQ(name("lm_head.weight"), "output.weight");
  EXPECT_EQ(name("model.layers.11.self_attn.q_proj.weight"), "blk.11.attn_q.weight");
  EXPECT_EQ(name("model.layers.0.self_attn.k_proj.bias"), "blk.0.attn_k.bias");
  EXPECT_EQ(name("model.layers.0.self_attn.v_proj.weight"), "blk.0.attn_v.weight");
  EXPECT_EQ(name("model.layers.0.self_attn.o_proj.weight"), "blk.0.attn_output.weight");
  EXPECT_EQ(name("model.layers.0.self_attn.q_norm.weight", "qwen3"), "blk.0.attn_q_norm.weight");
  EXPECT_EQ(name("model.layers.0.self_attn.k_norm.weight", "qwen3"), "blk.0.attn_k_norm.weight");
  EXPECT_EQ(name("model.layers.0.input_layernorm.weight"), "blk.0.attn_norm.weight");
  EXPECT_EQ(name("model.layers.0.post_attention_layernorm.weight"), "blk.0.ffn_norm.weight");
  EXPECT_EQ(name("model.layers.0.mlp.gate_proj.weight"), "blk.0.ffn_gate.weight");
  EXPECT_EQ(name("model.layers.0.mlp.up_proj.weight"), "blk.0.ffn_up.weight");
  EXPECT_EQ(name("model.layers.0.mlp.down_proj.weight"), "blk.0.ffn_down.weight");
  EXPECT_EQ(name("model.layers.3.self_attn.rotary_emb.inv_freq"), "");
}

TEST(HfNames, Opt) {
  for (const std::string prefix : {"model.decoder.", "decoder."}) {
    EXPECT_EQ(name(prefix + "embed_tokens.weight", "opt"), "token_embd.weight");
    EXPECT_EQ(name(prefix + "embed_positions.weight", "opt"), "position_embd.weight");
    EXPECT_EQ(name(prefix + "final_layer_norm.bias", "opt"), "output_norm.bias");
    EXPECT_EQ(name(prefix + "project_in.weight", "opt"), "token_embd_proj_in.weight");
    EXPECT_EQ(name(prefix + "project_out.weight", "opt"), "output_proj.weight");
    EXPECT_EQ(name(prefix + "layers.1.self_attn.out_proj.bias", "opt"), "blk.1.attn_output.bias");
    EXPECT_EQ(name(prefix + "layers.1.self_attn_layer_norm.weight", "opt"), "blk.1.attn_norm.weight");
    EXPECT_EQ(name(prefix + "layers.1.final_layer_norm.weight", "opt"), "blk.1.ffn_norm.weight");
    EXPECT_EQ(name(prefix + "layers.1.fc1.weight", "opt"), "blk.1.ffn_up.weight");
    EXPECT_EQ(name(prefix + "layers.1.fc2.bias", "opt"), "blk.1.ffn_down.bias");
  }
}

TEST(HfNames, UnknownTensorsAreNamed) {
  for (const char* unknown :
       {"model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.self_attn.q_proj.qweight", "weight", ".weight",
        "model.layers.weight", "model.layers..weight", "model.layers.x.mlp.up_proj.weight", "model.layers.1",
        "model.norm", "", "model.layers.1.fc1.weight"})
    EXPECT_ERROR(name(unknown), fmt::format("m: unknown tensor {} in a model of architecture llama", unknown));
  EXPECT_ERROR(name("model.layers.12.mlp.up_proj.weight"), "belongs to layer 12, but the model has 12 layers");
  EXPECT_ERROR(name("model.layers.-1.mlp.up_proj.weight"), "belongs to layer -1");
  EXPECT_ERROR(name("model.layers.99999999999999999999.mlp.up_proj.weight"), "unknown tensor");
  EXPECT_ERROR(name("model.layers.0.mlp.up_proj.weight", "opt"), "unknown tensor");
}

}  // namespace
}  // namespace lacuna::io
