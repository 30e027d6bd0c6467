#include "compress/layer_influence.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "compress/hidden_states.h"
#include "compress/net.h"
#include "core/error.h"
#include "core/progress.h"

namespace lacuna::compress {
namespace {

/// Sum over the tokens of [1, tokens, n_embd].
double sum_of_cosines(const at::Tensor& a, const at::Tensor& b) {
  const auto dot = [](const at::Tensor& x, const at::Tensor& y) { return (x * y).sum(-1, false, at::kDouble); };
  const at::Tensor lengths = (dot(a, a) * dot(b, b)).sqrt();
  return (dot(a, b) / lengths.masked_fill(lengths == 0, 1)).sum().item<double>();
}

}  // namespace

std::vector<double> block_influence(const io::Checkpoint& checkpoint, std::span<const int32_t> ids,
                                    const Samples& samples, const InfluenceOptions& options) {
  const c10::NoGradGuard no_grad;
  use_threads(options.threads);
  ThreadPool pool(options.threads);
  const Net net(checkpoint, options.device, &pool);
  HiddenStates hidden(net, ids, samples, options.hidden_file);
  std::optional<Progress> progress;
  const int64_t layers = net.config().n_layers;
  if (options.progress) progress.emplace("Measuring layers", layers * hidden.windows(), "windows");
  std::vector<double> influence;
  for (int64_t index = 0; index < layers; ++index) {
    const Layer layer = net.load_layer(index);
    double cosines = 0;
    for (int64_t w = 0; w < hidden.windows(); ++w) {
      const at::Tensor before = hidden.get(w), after = net.forward(layer, before);
      cosines += sum_of_cosines(before, after);
      hidden.set(w, after, index);
      if (progress) progress->add(1);
    }
    influence.push_back(1 - cosines / double(samples.tokens()));
  }
  return influence;
}

std::vector<int64_t> least_influential(std::span<const double> influence, int64_t count) {
  const auto layers = int64_t(influence.size());
  if (count >= layers) throw Error("--drop-layers {}: the model has {} layers, of which one must stay", count, layers);
  std::vector<int64_t> order(influence.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const double x = influence[size_t(a)], y = influence[size_t(b)];
    return x != y ? x < y : a > b;
  });
  order.resize(size_t(count));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace lacuna::compress
