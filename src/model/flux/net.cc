#include "model/flux/net.h"

#include <fmt/format.h>

#include "core/error.h"
#include "model/flux/binder.h"
#include "model/flux/embed.h"

namespace lacuna::model::flux {

namespace {

Linear linear(Binder& binder, const char* name, int64_t N, int64_t K, ThreadPool& pool) {
  const kernels::WeightView view = binder.weight(name, N, K);
  return {std::span(&view, 1), pool};
}

}  // namespace

void check_finite(std::span<const float> values, std::string_view where) {
  if (const int64_t bad = layout::find_non_finite(values); bad >= 0)
    throw Error("{}: result {} is {}, which is not finite; the weights or the inputs are too large for the net", where,
                bad, values[size_t(bad)]);
}

void Net::Embedder::add(std::vector<float> x, std::span<float> sum, const InputObserver* observer) {
  std::vector<float> inner(size_t(first.N())), result(size_t(second.N()));
  first.run(x.data(), 1, inner.data(), observer);
  silu(inner);
  second.run(inner.data(), 1, result.data(), observer);
  for (size_t i = 0; i < result.size(); ++i) sum[i] += result[i];
}

Net::Embedder Net::make_embedder(Binder& binder, const char* name, int64_t inputs) {
  const std::string prefix = fmt::format("time_text_embed.{}.linear_", name);
  const int64_t width = config_.width();
  return {linear(binder, (prefix + "1").c_str(), width, inputs, pool_),
          linear(binder, (prefix + "2").c_str(), width, width, pool_)};
}

Net::Net(const io::ImageCheckpoint& checkpoint, ThreadPool& pool)
    : config_(read_config(checkpoint)), pool_(pool), workspace_(config_, pool) {
  Binder binder(checkpoint, config_, biases_);
  const int64_t width = config_.width();
  latents_ = linear(binder, "x_embedder", width, config_.in_channels, pool);
  text_ = linear(binder, "context_embedder", width, config_.text_dim, pool);
  timestep_ = make_embedder(binder, "timestep_embedder", kTimeFrequencies);
  if (config_.guidance) guidance_ = make_embedder(binder, "guidance_embedder", kTimeFrequencies);
  pooled_ = make_embedder(binder, "text_embedder", config_.pooled_dim);
  for (int64_t i = 0; i < config_.n_double; ++i) double_.emplace_back(binder, i, config_, pool);
  for (int64_t i = 0; i < config_.n_single; ++i) single_.emplace_back(binder, i, config_, pool);
  scale_ = linear(binder, "norm_out.scale", width, width, pool);
  shift_ = linear(binder, "norm_out.shift", width, width, pool);
  last_ = linear(binder, "proj_out", config_.out_channels, width, pool);
  binder.check_all_used();
}

void check_inputs(const Config& config, const Inputs& inputs, int64_t results) {
  const auto rows = [](std::span<const float> values, int64_t columns, const char* what) {
    if (values.empty() || int64_t(values.size()) % columns != 0)
      throw Error("{}: {} values are no rows of {}, which the net takes", what, values.size(), columns);
    return int64_t(values.size()) / columns;
  };
  const auto axes = int64_t(config.rope_axes.size());
  const int64_t tokens = rows(inputs.latents, config.in_channels, "latents");
  const int64_t text = rows(inputs.text, config.text_dim, "text embeddings");
  if (rows(inputs.image_ids, axes, "image ids") != tokens)
    throw Error("image ids are of {} tokens, latents of {}", inputs.image_ids.size() / size_t(axes), tokens);
  if (rows(inputs.text_ids, axes, "text ids") != text)
    throw Error("text ids are of {} tokens, text embeddings of {}", inputs.text_ids.size() / size_t(axes), text);
  if (int64_t(inputs.pooled.size()) != config.pooled_dim)
    throw Error("the pooled text embedding has {} values, the net takes {}", inputs.pooled.size(), config.pooled_dim);
  if (results != tokens * config.out_channels)
    throw Error("room for {} results, the net makes {}", results, tokens * config.out_channels);
}

std::vector<float> Net::embed_conditions(const Inputs& inputs) {
  std::vector<float> out(size_t(config_.width()), 0.0f);
  const InputObserver* observer = workspace_.observer;
  timestep_.add(sinusoid(inputs.timestep * kTimeScale, kTimeFrequencies), out, observer);
  if (config_.guidance) guidance_.add(sinusoid(inputs.guidance * kTimeScale, kTimeFrequencies), out, observer);
  pooled_.add({inputs.pooled.begin(), inputs.pooled.end()}, out, observer);
  return out;
}

void Net::predict(const Inputs& inputs, std::span<float> out, const Observer* observer, const InputObserver* layers) {
  check_inputs(config_, inputs, int64_t(out.size()));
  const int64_t width = config_.width();
  const int64_t image = int64_t(inputs.latents.size()) / config_.in_channels;
  const int64_t text = int64_t(inputs.text.size()) / config_.text_dim;
  const auto show = [&](std::string_view name, std::span<const float> values) {
    if (observer != nullptr) (*observer)(name, values);
  };
  workspace_.reserve(text + image);
  workspace_.observer = layers;
  hidden_.resize(size_t((text + image) * width));
  const std::span text_rows(hidden_.data(), size_t(text * width));
  const std::span image_rows(hidden_.data() + text * width, size_t(image * width));
  RopeTable rope;
  std::vector<float> conditions;
  {
    const double weights = double(image) * double(config_.in_channels) + double(text) * double(config_.text_dim);
    const auto measure = workspace_.times.measure(Part::embed, 2.0 * double(width) * weights);
    text_.run(inputs.text.data(), text, text_rows.data(), layers);
    latents_.run(inputs.latents.data(), image, image_rows.data(), layers);
    std::vector<float> ids(inputs.text_ids.begin(), inputs.text_ids.end());
    ids.insert(ids.end(), inputs.image_ids.begin(), inputs.image_ids.end());
    rope = rope_table(ids, config_.rope_axes);
    conditions = embed_conditions(inputs);
  }
  show("x_embedder", image_rows);
  show("context_embedder", text_rows);
  show("time_text_embed", conditions);
  silu(conditions);
  const Conditions shared{conditions.data(), &rope, text, text + image};
  const auto run_blocks = [&](auto& blocks, const char* kind) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      blocks[i].run(workspace_, shared, hidden_.data());
      const std::string name = fmt::format("{}.{}", kind, i);
      check_finite(hidden_, name);
      show(name + ".text", text_rows);
      show(name, image_rows);
    }
  };
  run_blocks(double_, "transformer_blocks");
  run_blocks(single_, "single_transformer_blocks");

  const auto measure = workspace_.times.measure(Part::last, 2.0 * double(image) * double(width) * double(last_.N()));
  std::vector<float> scale(static_cast<size_t>(width)), shift(static_cast<size_t>(width));
  scale_.run(conditions.data(), 1, scale.data(), layers);  // one matrix with shift_
  shift_.run(conditions.data(), 1, shift.data());
  modulated_norm(workspace_, image_rows.data(), scale.data(), shift.data(), image, workspace_.normed.data());
  show("norm_out", {workspace_.normed.data(), image_rows.size()});
  last_.run(workspace_.normed.data(), image, out.data(), layers);
  check_finite(out, "proj_out");
}

}  // namespace lacuna::model::flux
