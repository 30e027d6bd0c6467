#include "io/hf_names.h"

#include <charconv>
#include <span>

#include "core/error.h"

namespace lacuna::io {

namespace {

struct Pair {
  std::string_view from, to;
};

// Inside one layer, without ".weight" or ".bias".
constexpr Pair kRotaryLayer[] = {{"input_layernorm", "attn_norm"},    {"self_attn.q_proj", "attn_q"},
                                 {"self_attn.k_proj", "attn_k"},      {"self_attn.v_proj", "attn_v"},
                                 {"self_attn.o_proj", "attn_output"}, {"self_attn.q_norm", "attn_q_norm"},
                                 {"self_attn.k_norm", "attn_k_norm"}, {"post_attention_layernorm", "ffn_norm"},
                                 {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
                                 {"mlp.down_proj", "ffn_down"}};
constexpr Pair kRotaryTop[] = {
    {"model.embed_tokens", "token_embd"}, {"model.norm", "output_norm"}, {"lm_head", "output"}};

constexpr Pair kOptLayer[] = {{"self_attn_layer_norm", "attn_norm"},
                              {"self_attn.q_proj", "attn_q"},
                              {"self_attn.k_proj", "attn_k"},
                              {"self_attn.v_proj", "attn_v"},
                              {"self_attn.out_proj", "attn_output"},
                              {"final_layer_norm", "ffn_norm"},
                              {"fc1", "ffn_up"},
                              {"fc2", "ffn_down"}};
constexpr Pair kOptTop[] = {{"decoder.embed_tokens", "token_embd"},      {"decoder.embed_positions", "position_embd"},
                            {"decoder.final_layer_norm", "output_norm"}, {"decoder.project_in", "token_embd_proj_in"},
                            {"decoder.project_out", "output_proj"},      {"lm_head", "output"}};

std::string_view find(std::span<const Pair> pairs, std::string_view from) {
  for (const Pair& pair : pairs)
    if (pair.from == from) return pair.to;
  return {};
}

}  // namespace

std::string gguf_tensor_name(std::string_view architecture, int64_t block_count, std::string_view name,
                             const std::string& where) {
  if (name.ends_with("rotary_emb.inv_freq")) return {};  // recomputed from the configuration
  const bool opt = architecture == "opt";
  std::string_view rest = name;
  if (opt && rest.starts_with("model.")) rest.remove_prefix(6);  // early OPT checkpoints lack "model."
  std::string_view suffix;
  for (const std::string_view end : {".weight", ".bias"})
    if (rest.ends_with(end)) suffix = end;
  std::string_view stem = rest.substr(0, rest.size() - suffix.size());

  if (!suffix.empty()) {
    const std::string_view top = opt ? find(kOptTop, stem) : find(kRotaryTop, stem);
    if (!top.empty()) return fmt::format("{}{}", top, suffix);
    const std::string_view layers = opt ? "decoder.layers." : "model.layers.";
    if (stem.starts_with(layers)) {
      stem.remove_prefix(layers.size());
      int64_t layer = -1;
      const auto [end, failed] = std::from_chars(stem.data(), stem.data() + stem.size(), layer);
      if (failed == std::errc() && end != stem.data() + stem.size() && *end == '.') {
        stem.remove_prefix(size_t(end + 1 - stem.data()));
        const std::string_view inner = opt ? find(kOptLayer, stem) : find(kRotaryLayer, stem);
        if (layer < 0 || layer >= block_count)
          throw Error("{}: tensor {} belongs to layer {}, but the model has {} layers", where, name, layer,
                      block_count);
        if (!inner.empty()) return fmt::format("blk.{}.{}{}", layer, inner, suffix);
      }
    }
  }
  throw Error("{}: unknown tensor {} in a model of architecture {}", where, name, architecture);
}

}  // namespace lacuna::io
