#include "model/flux/moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/ops.h"

namespace lacuna::model::flux {

Routing route(std::span<const float> logits, const MoeConfig& config) {
  const auto experts = size_t(config.n_experts), chosen = size_t(config.top_k), M = logits.size() / experts;
  std::vector<size_t> best(M * chosen), order(experts);
  std::vector<float> share(M * chosen);
  Routing out;
  out.offsets.assign(experts + 1, 0);
  for (size_t m = 0; m < M; ++m) {
    const std::span<const float> row = logits.subspan(m * experts, experts);
    std::iota(order.begin(), order.end(), size_t{0});
    const auto larger = [&](size_t a, size_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; };
    std::partial_sort(order.begin(), order.begin() + std::ptrdiff_t(chosen), order.end(), larger);
    double all = 0, of_chosen = 0;
    for (const float logit : row) all += std::exp(double(logit) - row[order[0]]);
    for (size_t i = 0; i < chosen; ++i) of_chosen += std::exp(double(row[order[i]]) - row[order[0]]);
    for (size_t i = 0; i < chosen; ++i) {
      best[m * chosen + i] = order[i];
      share[m * chosen + i] =
          float(std::exp(double(row[order[i]]) - row[order[0]]) / (config.normalize ? of_chosen : all));
      ++out.offsets[order[i] + 1];
    }
  }
  std::partial_sum(out.offsets.begin(), out.offsets.end(), out.offsets.begin());
  out.token.resize(M * chosen);
  out.weight.resize(M * chosen);
  std::vector<int64_t> next(out.offsets.begin(), out.offsets.end() - 1);
  for (size_t i = 0; i < M * chosen; ++i) {
    const auto row = size_t(next[best[i]]++);
    out.token[row] = int64_t(i / chosen);
    out.weight[row] = share[i];
  }
  return out;
}

Experts::Experts(Binder& binder, const std::string& name, const Config& config, ThreadPool& pool)
    : config_(config.moe), width_(config.width()) {
  const kernels::WeightView gate = binder.weight(name + ".gate", config_.n_experts, width_, Bias::none);
  gate_ = Linear(std::span(&gate, 1), pool);
  std::vector<kernels::WeightView> up, down;
  for (int64_t e = 0; e < config_.n_experts; ++e) {
    const std::string prefix = fmt::format("{}.experts.{}.net.", name, e);
    up.push_back(binder.weight(prefix + "0.proj", config_.width, width_));
    down.push_back(binder.weight(prefix + "2", width_, config_.width));
  }
  up_ = GroupedLinear(up, pool);
  down_ = GroupedLinear(down, pool);
}

void Experts::run(ThreadPool& pool, const float* x, int64_t M, float* y, PartTimes& times,
                  const InputObserver* observer) {
  const int64_t rows = M * config_.top_k;
  const double flops = 2.0 * double(rows) * double(width_) * double(config_.width);
  const auto row_bytes = size_t(width_) * sizeof(float);
  logits_.resize(size_t(M * config_.n_experts));
  rows_.resize(size_t(rows * width_));
  inner_.resize(size_t(rows * config_.width));
  results_.resize(size_t(rows * width_));
  Routing routing;
  {
    const auto measure = times.measure(Part::router, 2.0 * double(M) * double(width_) * double(config_.n_experts));
    gate_.run(x, M, logits_.data(), observer);
    routing = route(logits_, config_);
    pool.parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        std::memcpy(rows_.data() + row * width_, x + routing.token[size_t(row)] * width_, row_bytes);
    });
  }
  {
    const auto measure = times.measure(Part::expert_up, flops);
    up_.run(rows_.data(), routing.offsets, inner_.data(), observer);
  }
  {
    const auto measure = times.measure(Part::elementwise);
    kernels::gelu_tanh(pool, inner_.data(), rows, config_.width, config_.width);
  }
  {
    const auto measure = times.measure(Part::expert_down, flops);
    down_.run(inner_.data(), routing.offsets, results_.data(), observer);
  }
  const auto measure = times.measure(Part::elementwise);
  std::fill_n(y, M * width_, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    float* to = y + routing.token[size_t(row)] * width_;
    const float* from = results_.data() + row * width_;
    const float weight = routing.weight[size_t(row)];
    for (int64_t k = 0; k < width_; ++k) to[k] += weight * from[k];
  }
}

}  // namespace lacuna::model::flux
