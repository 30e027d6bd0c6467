#include "model/flux/block.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "kernels/ops.h"

namespace lacuna::model::flux {

namespace {

constexpr float kNormEps = 1e-6f;

double flops_of(const Linear& linear, int64_t M) { return 2.0 * double(M) * double(linear.N()) * double(linear.K()); }

Linear single_weight(const kernels::WeightView& view, ThreadPool& pool) { return {std::span(&view, 1), pool}; }

/// Norms of q and k of M tokens from `row` on.
void norm_heads(Workspace& w, const HeadNorms& norms, int64_t row, int64_t M) {
  const int64_t heads = M * w.config.n_heads, first = row * w.config.width();
  kernels::rms_norm(w.pool, w.q.data() + first, norms.q.data(), kNormEps, heads, w.config.head_dim, w.q.data() + first);
  kernels::rms_norm(w.pool, w.k.data() + first, norms.k.data(), kNormEps, heads, w.config.head_dim, w.k.data() + first);
}

/// Rotates q and k, then softmax attention of all tokens over all. out: [tokens, width], rows `stride` floats apart.
void attend(Workspace& w, const Conditions& conditions, float* out, int64_t stride) {
  const Config& config = w.config;
  const int64_t tokens = conditions.tokens, width = config.width(), head_dim = config.head_dim;
  const kernels::KvLayer cache{kernels::KvType::f32, w.keys.data(), w.values.data(), tokens, config.n_heads, head_dim};
  {
    const auto measure = w.times.measure(Part::elementwise);
    for (float* x : {w.q.data(), w.k.data()})
      kernels::rope(w.pool, x, tokens, config.n_heads, head_dim, width, conditions.rope->cos.data(),
                    conditions.rope->sin.data(), head_dim, true);
    kernels::kv_store(w.pool, cache, 0, tokens, w.k.data(), width, w.v.data(), width);
  }
  const auto measure = w.times.measure(Part::attention, 4.0 * double(tokens) * double(tokens) * double(width));
  kernels::AttentionArgs args;
  args.q = w.q.data();
  args.q_stride = width;
  args.M = tokens;
  args.n_heads = config.n_heads;
  args.cache = cache;
  args.scale = float(1 / std::sqrt(double(head_dim)));
  args.out = out;
  args.out_stride = stride;
  args.causal = false;
  kernels::attention(w.pool, args);
}

}  // namespace

void Workspace::reserve(int64_t tokens) {
  const auto rows = size_t(tokens * config.width());
  for (std::vector<float>* buffer : {&normed, &q, &k, &v, &keys, &values, &result}) buffer->resize(rows);
  inner.resize(size_t(tokens * (config.width() + config.mlp_width)));
}

void modulated_norm(Workspace& w, const float* x, const float* scale, const float* shift, int64_t M, float* y) {
  std::vector<float> weight(scale, scale + w.config.width());
  for (float& value : weight) value += 1;
  kernels::layer_norm(w.pool, x, weight.data(), shift, kNormEps, M, w.config.width(), y);
}

FeedForward::FeedForward(Binder& binder, const std::string& name, const Config& config, bool experts, bool is_text,
                         ThreadPool& pool)
    : is_text_(is_text) {
  if (experts) {
    experts_.emplace(binder, name, config, pool);
    return;
  }
  up_ = single_weight(binder.weight(name + ".net.0.proj", config.mlp_width, config.width()), pool);
  down_ = single_weight(binder.weight(name + ".net.2", config.width(), config.mlp_width), pool);
}

void FeedForward::run(Workspace& w, const float* x, int64_t M, float* y) {
  if (experts_) return experts_->run(w.pool, x, M, y, w.times, w.observer);
  {
    const auto measure = w.times.measure(is_text_ ? Part::text_up : Part::double_up, flops_of(up_, M));
    up_.run(x, M, w.inner.data(), w.observer);
  }
  {
    const auto measure = w.times.measure(Part::elementwise);
    kernels::gelu_tanh(w.pool, w.inner.data(), M, up_.N(), up_.N());
  }
  const auto measure = w.times.measure(is_text_ ? Part::text_down : Part::double_down, flops_of(down_, M));
  down_.run(w.inner.data(), M, y, w.observer);
}

DoubleBlock::Stream DoubleBlock::make_stream(Binder& binder, const std::string& prefix, bool is_text,
                                             const Config& config, ThreadPool& pool) {
  const int64_t width = config.width();
  const std::string attention = prefix + (is_text ? "attn.add_" : "attn.to_"), end = is_text ? "_proj" : "";
  std::vector<kernels::WeightView> qkv;
  for (const char* part : {"q", "k", "v"}) qkv.push_back(binder.weight(attention + part + end, width, width));
  const std::string norm = prefix + (is_text ? "attn.norm_added_" : "attn.norm_");
  return {
      single_weight(binder.weight(prefix + (is_text ? "norm1_context" : "norm1") + ".linear", 6 * width, width), pool),
      Linear(qkv, pool),
      single_weight(binder.weight(prefix + (is_text ? "attn.to_add_out" : "attn.to_out.0"), width, width), pool),
      {binder.norm(norm + "q", config.head_dim), binder.norm(norm + "k", config.head_dim)},
      FeedForward(binder, prefix + (is_text ? "ff_context" : "ff"), config, !is_text && config.moe.n_experts > 0,
                  is_text, pool),
      is_text};
}

DoubleBlock::DoubleBlock(Binder& binder, int64_t index, const Config& config, ThreadPool& pool)
    : text_(make_stream(binder, fmt::format("transformer_blocks.{}.", index), true, config, pool)),
      image_(make_stream(binder, fmt::format("transformer_blocks.{}.", index), false, config, pool)) {}

void DoubleBlock::run(Workspace& w, const Conditions& conditions, float* x) {
  const int64_t width = w.config.width();
  const auto at = [&](std::vector<float>& buffer, int64_t row) { return buffer.data() + row * width; };
  struct Rows {
    Stream& stream;
    int64_t first, count;
    std::vector<float> modulation;  // [6, width]: shift, scale and gate of the attention, then of the MLP
  };
  const int64_t text = conditions.text_tokens;
  Rows both[] = {{text_, 0, text, {}}, {image_, text, conditions.tokens - text, {}}};
  for (Rows& rows : both) {
    Stream& stream = rows.stream;
    rows.modulation.resize(size_t(6 * width));
    {
      const auto measure = w.times.measure(Part::modulation, flops_of(stream.modulation, 1));
      stream.modulation.run(conditions.silu_embedding, 1, rows.modulation.data(), w.observer);
    }
    const float* modulation = rows.modulation.data();
    {
      const auto measure = w.times.measure(Part::elementwise);
      modulated_norm(w, x + rows.first * width, modulation + width, modulation, rows.count, at(w.normed, rows.first));
    }
    {
      const auto measure =
          w.times.measure(stream.is_text ? Part::text_qkv : Part::double_qkv, flops_of(stream.qkv, rows.count));
      const std::array<kernels::Output, 3> out = {
          kernels::Output{at(w.q, rows.first), width}, {at(w.k, rows.first), width}, {at(w.v, rows.first), width}};
      stream.qkv.run(at(w.normed, rows.first), rows.count, width, out, w.observer);
    }
    const auto measure = w.times.measure(Part::elementwise);
    norm_heads(w, stream.norms, rows.first, rows.count);
  }
  attend(w, conditions, w.normed.data(), width);
  for (Rows& rows : both) {
    Stream& stream = rows.stream;
    const float* modulation = rows.modulation.data();
    float *hidden = x + rows.first * width, *normed = at(w.normed, rows.first), *result = at(w.result, rows.first);
    {
      const auto measure =
          w.times.measure(stream.is_text ? Part::text_out : Part::double_out, flops_of(stream.out, rows.count));
      stream.out.run(normed, rows.count, result, w.observer);
    }
    {
      const auto measure = w.times.measure(Part::elementwise);
      kernels::add_gated(w.pool, result, modulation + 2 * width, rows.count, width, hidden);
      modulated_norm(w, hidden, modulation + 4 * width, modulation + 3 * width, rows.count, normed);
    }
    stream.feed_forward.run(w, normed, rows.count, result);
    const auto measure = w.times.measure(Part::elementwise);
    kernels::add_gated(w.pool, result, modulation + 5 * width, rows.count, width, hidden);
  }
}

SingleBlock::SingleBlock(Binder& binder, int64_t index, const Config& config, ThreadPool& pool) {
  const std::string prefix = fmt::format("single_transformer_blocks.{}.", index);
  const int64_t width = config.width(), inner = config.moe.n_experts > 0 ? 0 : config.mlp_width;
  modulation_ = single_weight(binder.weight(prefix + "norm.linear", 3 * width, width), pool);
  std::vector<kernels::WeightView> in;
  for (const char* part : {"attn.to_q", "attn.to_k", "attn.to_v"})
    in.push_back(binder.weight(prefix + part, width, width));
  if (inner > 0) in.push_back(binder.weight(prefix + "proj_mlp", inner, width));
  in_ = Linear(in, pool);
  norms_ = {binder.norm(prefix + "attn.norm_q", config.head_dim), binder.norm(prefix + "attn.norm_k", config.head_dim)};
  out_ = single_weight(binder.weight(prefix + "proj_out", width, width + inner), pool);
  if (config.moe.n_experts > 0) experts_.emplace(binder, prefix + "ff", config, pool);
}

void SingleBlock::run(Workspace& w, const Conditions& conditions, float* x) {
  const int64_t width = w.config.width(), tokens = conditions.tokens;
  const int64_t inner = experts_ ? 0 : w.config.mlp_width, stride = width + inner;
  std::vector<float> modulation(size_t(3 * width));  // shift, scale, gate
  {
    const auto measure = w.times.measure(Part::modulation, flops_of(modulation_, 1));
    modulation_.run(conditions.silu_embedding, 1, modulation.data(), w.observer);
  }
  {
    const auto measure = w.times.measure(Part::elementwise);
    modulated_norm(w, x, modulation.data() + width, modulation.data(), tokens, w.normed.data());
  }
  {
    const auto measure = w.times.measure(Part::single_in, flops_of(in_, tokens));
    std::vector<kernels::Output> out = {{w.q.data(), width}, {w.k.data(), width}, {w.v.data(), width}};
    if (!experts_) out.push_back({w.inner.data() + width, stride});
    in_.run(w.normed.data(), tokens, width, out, w.observer);
  }
  {
    const auto measure = w.times.measure(Part::elementwise);
    norm_heads(w, norms_, 0, tokens);
    if (!experts_) kernels::gelu_tanh(w.pool, w.inner.data() + width, tokens, inner, stride);
  }
  attend(w, conditions, w.inner.data(), stride);
  {
    const auto measure = w.times.measure(Part::single_out, flops_of(out_, tokens));
    out_.run(w.inner.data(), tokens, w.result.data(), w.observer);
  }
  {
    const auto measure = w.times.measure(Part::elementwise);
    kernels::add_gated(w.pool, w.result.data(), modulation.data() + 2 * width, tokens, width, x);
  }
  if (!experts_) return;
  experts_->run(w.pool, w.normed.data(), tokens, w.result.data(), w.times, w.observer);
  const auto measure = w.times.measure(Part::elementwise);
  kernels::add_gated(w.pool, w.result.data(), modulation.data() + 2 * width, tokens, width, x);
}

}  // namespace lacuna::model::flux
