#include "model/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "io/rope_scaling.h"
#include "layout/layout.h"

namespace lacuna::model {
namespace {

constexpr std::array<std::string_view, 4> kArchitectures = {"llama", "opt", "qwen2", "qwen3"};

/// Reads `{architecture}.{name}` with the checks that all hyperparameters share.
class Reader {
 public:
  explicit Reader(const io::Checkpoint& checkpoint)
      : checkpoint_(checkpoint), metadata_(checkpoint.metadata()), architecture_(checkpoint.architecture()) {}

  Config read() {
    if (std::find(kArchitectures.begin(), kArchitectures.end(), architecture_) == kArchitectures.end())
      throw Error("{}: unknown architecture \"{}\"; known are {}", checkpoint_.path(), architecture_,
                  fmt::join(kArchitectures, ", "));
    const bool opt = architecture_ == "opt";
    c_.architecture = architecture_;
    c_.name = metadata_.string("general.name").value_or("");
    c_.n_layers = count("block_count");
    c_.n_embd = count("embedding_length");
    c_.n_ctx = count("context_length");
    c_.n_ff = per_layer("feed_forward_length").value_or(0);
    if (c_.n_ff <= 0) fail("feed_forward_length is missing or not positive");
    read_vocabulary_size();
    read_heads();
    if (metadata_.integer(key("expert_count")).value_or(0) != 0)
      fail("it is a mixture of experts (expert_count), which is not supported");
    c_.window = metadata_.integer(key("attention.sliding_window")).value_or(0);
    if (c_.window < 0) fail("attention.sliding_window is negative");
    c_.qk_norm = architecture_ == "qwen3";
    c_.norm = opt ? Norm::layer : Norm::rms;
    const double eps =
        metadata_.need_number(key(opt ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon"));
    if (!(eps >= 0) || !std::isfinite(eps)) fail(fmt::format("the epsilon of its norms is {}", eps));
    c_.norm_eps = float(eps);
    if (opt) {
      read_opt();
    } else {
      read_rope();
    }
    return std::move(c_);
  }

 private:
  std::string key(std::string_view name) const { return fmt::format("{}.{}", architecture_, name); }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error("{}: this model cannot be run: {}", checkpoint_.path(), what);
  }

  int64_t count(std::string_view name) const {
    const int64_t value = metadata_.need_integer(key(name));
    if (value <= 0 || value > (int64_t{1} << 31)) fail(fmt::format("{} = {}, expected 1 to 2^31", key(name), value));
    return value;
  }

  /// A count that may be an array with one entry per layer; all must be equal.
  std::optional<int64_t> per_layer(std::string_view name) const {
    const auto values = metadata_.integers(key(name));
    if (!values || values->empty()) return std::nullopt;
    for (const int64_t value : *values)
      if (value != values->front())
        fail(fmt::format("{} differs from layer to layer ({} and {}), which is not supported", key(name),
                         values->front(), value));
    if (values->front() <= 0 || values->front() > (int64_t{1} << 31))
      fail(fmt::format("{} = {}, expected 1 to 2^31", key(name), values->front()));
    return values->front();
  }

  void read_vocabulary_size() {
    const io::Tensor& embedding = checkpoint_.require("token_embd.weight");
    c_.n_vocab = embedding.shape.N;
    if (const auto told = metadata_.integer(key("vocab_size")); told && *told != c_.n_vocab)
      fail(fmt::format("vocab_size = {}, but token_embd.weight has {} rows", *told, c_.n_vocab));
    const auto tokens = int64_t(checkpoint_.vocabulary().tokens.size());
    if (tokens > c_.n_vocab)
      fail(fmt::format("its tokenizer has {} tokens, but token_embd.weight only {} rows", tokens, c_.n_vocab));
  }

  void read_heads() {
    const auto heads = per_layer("attention.head_count");
    if (!heads) fail(fmt::format("{} is missing", key("attention.head_count")));
    c_.n_heads = *heads;
    c_.n_kv_heads = per_layer("attention.head_count_kv").value_or(c_.n_heads);
    if (c_.n_heads % c_.n_kv_heads != 0)
      fail(fmt::format("attention.head_count = {} is no multiple of attention.head_count_kv = {}", c_.n_heads,
                       c_.n_kv_heads));
    if (const auto length = metadata_.integer(key("attention.key_length"))) {
      c_.head_dim = *length;
    } else {
      if (c_.n_embd % c_.n_heads != 0)
        fail(
            fmt::format("embedding_length = {} is no multiple of attention.head_count = {}, and there is no "
                        "attention.key_length",
                        c_.n_embd, c_.n_heads));
      c_.head_dim = c_.n_embd / c_.n_heads;
    }
    if (c_.head_dim <= 0 || c_.head_dim > 4096) fail(fmt::format("its heads have {} elements", c_.head_dim));
    if (const auto length = metadata_.integer(key("attention.value_length")); length && *length != c_.head_dim)
      fail(fmt::format("attention.value_length = {} differs from attention.key_length = {}, which is not supported",
                       *length, c_.head_dim));
    const double scale = metadata_.number(key("attention.scale")).value_or(0);
    if (scale != 0 && std::abs(scale * std::sqrt(double(c_.head_dim)) - 1) > 1e-5)
      fail(fmt::format("attention.scale = {}, only 1/sqrt(head size) is supported", scale));
  }

  void read_opt() {
    c_.mlp = Mlp::relu;
    c_.positions = Positions::learned;
    c_.position_offset = metadata_.integer(key("position_offset")).value_or(2);
    if (c_.position_offset < 0 || c_.position_offset > 1024)
      fail(fmt::format("position_offset = {} is not between 0 and 1024", c_.position_offset));
    c_.norm_first = metadata_.boolean(key("do_layer_norm_before")).value_or(true);
    const std::string activation = metadata_.string(key("activation_function")).value_or("relu");
    if (activation != "relu")
      fail(fmt::format("activation_function \"{}\" is not supported, known is relu", activation));
  }

  // ---- rotary embedding ----

  float positive(std::string_view name, std::optional<double> fallback = std::nullopt) const {
    const double value = fallback ? metadata_.number(key(name)).value_or(*fallback) : metadata_.need_number(key(name));
    if (!(value > 0) || !std::isfinite(value))
      fail(fmt::format("{} = {}, expected a positive number", key(name), value));
    return float(value);
  }

  void read_rope() {
    Rope& rope = c_.rope;
    rope.adjacent = checkpoint_.rope_pairs() == io::RopePairs::adjacent;
    rope.n_rot = metadata_.integer(key("rope.dimension_count")).value_or(c_.head_dim);
    if (rope.n_rot <= 0 || rope.n_rot > c_.head_dim || rope.n_rot % 2 != 0)
      fail(fmt::format("rope.dimension_count = {} with heads of {} elements, expected an even number up to that",
                       rope.n_rot, c_.head_dim));
    const double base = positive("rope.freq_base", 10000.0);
    rope.inv_freq.resize(size_t(rope.n_rot / 2));
    // In float as the models were trained: base^(2i/n) rounded, then its reciprocal.
    for (size_t i = 0; i < rope.inv_freq.size(); ++i)
      rope.inv_freq[i] = 1.0f / float(std::pow(base, double(2 * i) / double(rope.n_rot)));

    const io::Tensor* factors = checkpoint_.find("rope_freqs.weight");
    const std::string type = metadata_.string(key("rope.scaling.type")).value_or("none");
    if (const auto old = metadata_.number(key("rope.scale_linear")); old && *old != 1 && type == "none") {
      scale_linear(positive("rope.scale_linear"));
    } else if (type == "linear") {
      scale_linear(positive("rope.scaling.factor"));
    } else if (type == "llama3") {
      if (factors == nullptr) scale_llama3();  // the tensor holds the same, computed
    } else if (type == "yarn") {
      scale_yarn(base);
    } else if (type != "none") {
      fail(fmt::format("rope.scaling.type \"{}\" is not supported, known are none, linear, llama3, yarn", type));
    }
    if (factors != nullptr) divide_by(*factors);
  }

  void scale_linear(float factor) {
    for (float& f : c_.rope.inv_freq) f /= factor;
  }

  void scale_llama3() {
    const io::Llama3Scaling scaling{.factor = positive("rope.scaling.factor"),
                                    .low_freq_factor = positive("rope.scaling.low_freq_factor", 1.0),
                                    .high_freq_factor = positive("rope.scaling.high_freq_factor", 4.0),
                                    .original_context = positive("rope.scaling.original_context_length")};
    if (!(scaling.low_freq_factor < scaling.high_freq_factor))
      fail(fmt::format("rope.scaling.low_freq_factor = {} is not below high_freq_factor = {}", scaling.low_freq_factor,
                       scaling.high_freq_factor));
    for (float& f : c_.rope.inv_freq) f = float(double(f) * scaling.multiplier(double(f)));
  }

  /// YaRN (Peng et al. 2023) with the bounds and the attention factor of transformers.
  void scale_yarn(double base) {
    const double factor = positive("rope.scaling.factor"), fast = positive("rope.scaling.yarn_beta_fast", 32.0),
                 slow = positive("rope.scaling.yarn_beta_slow", 1.0),
                 context = positive("rope.scaling.original_context_length", double(c_.n_ctx));
    const auto n_rot = double(c_.rope.n_rot);
    // The pair that makes `turns` turns within the original context.
    const auto pair_with = [&](double turns) {
      return n_rot * std::log(context / (turns * 2 * std::numbers::pi)) / (2 * std::log(base));
    };
    const double low = std::max(std::floor(pair_with(fast)), 0.0);
    double high = std::min(std::ceil(pair_with(slow)), n_rot - 1);
    if (low == high) high += 0.001;
    for (size_t i = 0; i < c_.rope.inv_freq.size(); ++i) {
      const double stretched = std::clamp((double(i) - low) / (high - low), 0.0, 1.0);
      float& f = c_.rope.inv_freq[i];
      f = float(double(f) / factor * stretched + double(f) * (1 - stretched));
    }
    const double usual = factor > 1 ? 0.1 * std::log(factor) + 1 : 1.0;
    c_.rope.attention_factor = float(positive("rope.scaling.yarn_attn_factor", 1.0) * usual);
  }

  void divide_by(const io::Tensor& factors) {
    const auto half = int64_t(c_.rope.inv_freq.size());
    if (factors.shape != layout::Shape{1, half})
      fail(fmt::format("rope_freqs.weight is {} x {}, expected {} values", factors.shape.N, factors.shape.K, half));
    std::vector<float> values(c_.rope.inv_freq.size());
    layout::decode_rows(*factors.layout, factors.shape, factors.bytes, 0, 1, values.data());
    for (size_t i = 0; i < values.size(); ++i) {
      if (!(values[i] > 0) || !std::isfinite(values[i])) fail(fmt::format("rope_freqs.weight[{}] = {}", i, values[i]));
      c_.rope.inv_freq[i] /= values[i];
    }
  }

  const io::Checkpoint& checkpoint_;
  const io::Metadata& metadata_;
  const std::string architecture_;
  Config c_;
};

}  // namespace

Config read_config(const io::Checkpoint& checkpoint) {
  return naming_file(checkpoint.path(), [&] { return Reader(checkpoint).read(); });
}

}  // namespace lacuna::model
