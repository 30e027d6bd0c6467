#include "calibrate/sensitivity.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <queue>

#include "core/progress.h"

namespace lacuna::calibrate {

using model::kInputs;

std::vector<std::array<double, kInputs>> measure_sensitivity(Subject& subject, std::span<const int32_t> ids,
                                                             const model::Thresholds& thresholds, int64_t dense_prefix,
                                                             bool progress) {
  const int64_t V = subject.config().n_vocab, n_layers = subject.config().n_layers;
  std::vector<float> probability(ids.size() * size_t(V));  // of the dense model
  std::vector<double> own(ids.size());                     // sum of p log p
  subject.set_sparsity(std::nullopt);
  subject.score(ids, [&](int64_t first, int64_t count, const float* logits) {
    subject.pool().parallel_for(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* in = logits + row * V;
        float* p = probability.data() + (first + row) * V;
        const double lse = kernels::log_sum_exp(in, V);
        double sum = 0;
        for (int64_t v = 0; v < V; ++v) {
          p[v] = std::exp(in[v] - float(lse));
          sum += double(p[v]) * (double(in[v]) - lse);
        }
        own[size_t(first + row)] = sum;
      }
    });
  });

  std::optional<Progress> bar;
  if (progress) bar.emplace("Sensitivity", n_layers * kInputs, "inputs");
  std::vector<std::array<double, kInputs>> out(static_cast<size_t>(n_layers));
  std::vector<double> divergence(ids.size());
  for (int64_t layer = 0; layer < n_layers; ++layer) {
    for (int64_t input = 0; input < kInputs; ++input) {
      model::Thresholds one = thresholds;
      for (auto& t : one.t) t = {};
      one.t[size_t(layer)][size_t(input)] = thresholds.t[size_t(layer)][size_t(input)];
      subject.set_sparsity(model::SparsityOptions{std::move(one), dense_prefix, true});
      subject.score(ids, [&](int64_t first, int64_t count, const float* logits) {
        subject.pool().parallel_for(count, 1, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            const float* in = logits + row * V;
            const float* p = probability.data() + (first + row) * V;
            double sum = 0;
            for (int64_t v = 0; v < V; ++v) sum += double(p[v]) * double(in[v]);
            divergence[size_t(first + row)] = own[size_t(first + row)] - sum + kernels::log_sum_exp(in, V);
          }
        });
      });
      double sum = 0;
      for (const double d : divergence) sum += d;
      out[size_t(layer)][size_t(input)] = std::max(0.0, sum / double(ids.size()));
      if (bar) bar->add(1);
    }
  }
  subject.set_sparsity(std::nullopt);
  return out;
}

std::vector<std::array<double, kInputs>> allocate(const std::vector<std::array<double, kInputs>>& divergence,
                                                  const model::PerInput& measured_at,
                                                  const std::vector<std::array<Histogram, kInputs>>& sizes,
                                                  const std::vector<std::array<int64_t, kInputs>>& bytes,
                                                  double level) {
  constexpr int kSteps = 200;
  double total = 0;
  for (const auto& layer : bytes)
    for (const int64_t part : layer) total += double(part);
  std::vector<std::array<double, kInputs>> share(divergence.size());

  struct Unit {
    double cost;  // of the next step, for each byte
    size_t layer, input;
    bool operator<(const Unit& other) const { return cost > other.cost; }
  };
  // Predicted divergence at share i / kSteps.
  std::vector<std::array<std::vector<double>, kInputs>> curve(divergence.size());
  std::priority_queue<Unit> queue;
  const auto push = [&](size_t l, size_t i) {
    const auto step = size_t(std::lround(share[l][i] * kSteps));
    if (step + 1 >= curve[l][i].size()) return;
    queue.push({(curve[l][i][step + 1] - curve[l][i][step]) / double(bytes[l][i]), l, i});
  };
  for (size_t l = 0; l < divergence.size(); ++l) {
    for (size_t i = 0; i < size_t(kInputs); ++i) {
      const double unit = sizes[l][i].energy_below(measured_at[l][i]);
      for (int s = 0; s < kSteps; ++s)
        curve[l][i].push_back(unit > 0 ? divergence[l][i] / unit *
                                             sizes[l][i].energy_below(sizes[l][i].quantile(double(s) / kSteps))
                                       : 0);
      push(l, i);
    }
  }
  for (double reached = 0; reached < level && !queue.empty();) {
    const Unit next = queue.top();
    queue.pop();
    const double gain = double(bytes[next.layer][next.input]) / total / kSteps;
    share[next.layer][next.input] += std::min(1.0, (level - reached) / gain) / kSteps;
    reached += gain;
    push(next.layer, next.input);
  }
  return share;
}

}  // namespace lacuna::calibrate
