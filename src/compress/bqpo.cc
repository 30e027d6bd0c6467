#include "compress/bqpo.h"

#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "compress/training.h"
#include "core/error.h"
#include "solver/project.h"

namespace lacuna::compress {
namespace {

using Solutions = std::array<solver::Solution, model::kMatrices>;

/// [windows, tokens, 1]: how much each token's error counts.
at::Tensor weights_of(const at::Tensor& target, const TokenWeights& tokens) {
  const at::Tensor squares = target.square().sum(-1, true);
  at::Tensor weight = at::ones_like(squares);
  if (tokens.clip > 0) {
    const at::Tensor most = std::get<0>(squares.median(1, true)) * tokens.clip;
    weight = at::where(squares > most, most / squares.clamp_min(1e-30), weight);
  }
  weight.select(1, 0).mul_(tokens.first);
  return weight;
}

struct Loss {
  at::Tensor error, whole;  // sums of w |y - t|^2 and of w |t|^2
};

Loss compare(const at::Tensor& got, const at::Tensor& target, const TokenWeights& tokens) {
  const at::Tensor weight = weights_of(target, tokens);
  return {((got - target).square() * weight).sum(), (target.square() * weight).sum()};
}

solver::Solution solution_of(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid) {
  const at::Tensor kept = solver::masked(W.detach(), keep);
  if (grid.bits == 0) return solver::stored(kept, keep);
  return solver::stored(solver::round_to_grid(kept, grid, solver::fit_grid(kept, grid)), grid, keep);
}

class Block {
 public:
  Block(const Net& net, const Layer& layer, const solver::Grid& grid, const TokenWeights& tokens, int64_t windows,
        const Window& inputs, const Window& targets)
      : net_(net), layer_(layer), grid_(grid), tokens_(tokens), windows_(windows), inputs_(inputs), targets_(targets) {}

  /// Over all windows, with the solutions' weights.
  double lost(const Solutions& solutions) const {
    const c10::NoGradGuard no_grad;
    Layer layer = layer_;
    for (size_t m = 0; m < solutions.size(); ++m)
      if (solutions[m].weight.defined()) layer.weight[m] = solutions[m].weight;
    double error = 0, whole = 0;
    for (int64_t w = 0; w < windows_; ++w) {
      const Loss loss = compare(net_.forward(layer, inputs_(w)), targets_(w), tokens_);
      error += loss.error.item<double>(), whole += loss.whole.item<double>();
    }
    return whole > 0 ? error / whole : 0;
  }

  /// The loss of some windows with weights W, which gradients reach.
  at::Tensor loss(const std::array<at::Tensor, model::kMatrices>& W, const Solutions& solutions,
                  std::span<const int64_t> batch) const {
    Layer layer = layer_;
    for (size_t m = 0; m < W.size(); ++m)
      if (W[m].defined()) layer.weight[m] = fake_quantize(W[m], solutions[m].keep, grid_);
    std::vector<at::Tensor> in, out;
    for (const int64_t w : batch) in.push_back(inputs_(w)), out.push_back(targets_(w));
    const Loss sums = compare(net_.forward(layer, at::cat(in)), at::cat(out), tokens_);
    return sums.error / sums.whole.clamp_min(1e-30);
  }

 private:
  const Net& net_;
  const Layer& layer_;
  solver::Grid grid_;
  TokenWeights tokens_;
  int64_t windows_;
  const Window &inputs_, &targets_;
};

}  // namespace

at::Tensor fake_quantize(const at::Tensor& W, const at::Tensor& keep, const solver::Grid& grid) {
  const at::Tensor kept = solver::masked(W, keep);
  if (grid.bits == 0) return kept;
  const at::Tensor w = solver::grouped(kept, grid.group(W.size(1)));
  const at::Tensor low = w.amin({2}, true).clamp_max(0), high = w.amax({2}, true).clamp_min(0);
  const double codes = double((1 << grid.bits) - 1), half = double(1 << (grid.bits - 1));
  const at::Tensor exact = grid.symmetric ? at::maximum(high / (half - 1), low / -half) : (high - low) / codes;
  const at::Tensor scale = straight_through(exact.to(at::kHalf).to(at::kFloat), exact);
  const at::Tensor empty = scale == 0, step = scale.masked_fill(empty, 1);
  at::Tensor zero;
  if (grid.symmetric) {
    zero = at::full_like(scale, half);
  } else {
    const at::Tensor place = low.neg() / step;
    zero = straight_through(place.round(), place).clamp(0, codes).masked_fill(empty, 0);
  }
  const at::Tensor place = w / step;
  const at::Tensor code = (straight_through(place.round(), place) + zero).clamp(0, codes);
  return solver::masked(solver::ungrouped((code - zero) * scale, W.size(1)), keep);
}

BqpoReport bqpo(const Net& net, const Layer& layer, const solver::Grid& grid, const TokenWeights& tokens,
                const BqpoOptions& options, uint64_t seed, int64_t windows, const Window& inputs, const Window& targets,
                Solutions& solutions, const std::function<void(int64_t)>& after_windows) {
  const auto start = std::chrono::steady_clock::now();
  const Block block(net, layer, grid, tokens, windows, inputs, targets);
  BqpoReport report;
  report.before = block.lost(solutions);
  after_windows(windows);

  std::array<at::Tensor, model::kMatrices> W;
  std::vector<at::Tensor> parameters;
  for (size_t m = 0; m < W.size(); ++m) {
    if (!solutions[m].weight.defined()) continue;
    const at::Tensor& from = solutions[m].unrounded.defined() ? solutions[m].unrounded : layer.weight[m];
    W[m] = solver::masked(from, solutions[m].keep).detach().clone();
    W[m].set_requires_grad(true);
    parameters.push_back(W[m]);
  }
  torch::optim::AdamW adam(parameters, torch::optim::AdamWOptions(options.lr).weight_decay(0));
  std::vector<int64_t> order(static_cast<size_t>(windows));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(seed);
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    shuffle(order, rng);
    double sum = 0;
    int64_t steps = 0;
    for (size_t first = 0; first < order.size(); first += size_t(options.batch), ++steps) {
      const c10::AutoGradMode gradients(true);
      const auto batch = std::span(order).subspan(first, std::min(size_t(options.batch), order.size() - first));
      adam.zero_grad();
      const at::Tensor loss = block.loss(W, solutions, batch);
      loss.backward();
      adam.step();
      const double value = loss.item<double>();
      if (!std::isfinite(value))
        throw Error("block optimisation: the loss is no longer a number in epoch {}; take a smaller --bqpo-lr than {}",
                    epoch + 1, options.lr);
      sum += value;
      after_windows(int64_t(batch.size()));
    }
    report.epochs.push_back(sum / double(std::max<int64_t>(1, steps)));
  }

  Solutions trained;
  for (size_t m = 0; m < W.size(); ++m)
    if (W[m].defined()) trained[m] = solution_of(W[m], solutions[m].keep, grid);
  report.after = block.lost(trained);
  after_windows(windows);
  report.kept = report.after < report.before;
  if (report.kept) solutions = trained;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace lacuna::compress
