#include "compress/block_training.h"

#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <span>

#include "compress/device.h"
#include "compress/training.h"
#include "core/error.h"
#include "solver/project.h"

namespace lacuna::compress {
namespace {

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

/// Of a layer in place of the block's, in some windows.
Loss loss_of(const Block& block, const Layer& layer, std::span<const int64_t> batch) {
  std::vector<at::Tensor> in, out;
  for (const int64_t w : batch) in.push_back(block.inputs(w)), out.push_back(block.targets(w));
  const at::Tensor got = block.net.forward(layer, at::cat(in)), target = at::cat(out);
  const at::Tensor weight = weights_of(target, block.tokens);
  return {((got - target).square() * weight).sum(), (target.square() * weight).sum()};
}

/// Over all windows.
double lost(const Block& block, const Solutions& solutions) {
  const c10::NoGradGuard no_grad;
  Layer layer = block.layer;
  for (size_t m = 0; m < solutions.size(); ++m)
    if (solutions[m].weight.defined()) layer.weight[m] = solutions[m].weight;
  double error = 0, whole = 0;
  for (int64_t w = 0; w < block.windows; ++w) {
    const Loss loss = loss_of(block, layer, std::span(&w, 1));
    error += loss.error.item<double>(), whole += loss.whole.item<double>();
  }
  return whole > 0 ? error / whole : 0;
}

/// -> the mean loss over the steps of each epoch.
std::vector<double> run_epochs(const Block& block, const TrainingOptions& options, const Trainee& trainee) {
  const c10::AutoGradMode gradients(true);
  std::vector<at::Tensor> parameters;
  Layer layer = block.layer;
  for (size_t m = 0; m < trainee.matrices.size(); ++m) {
    const Parametrized* const matrix = trainee.matrices[m];
    if (matrix == nullptr) continue;
    layer.product[m] = [matrix](const at::Tensor& x) { return product(x, *matrix); };
    for (const at::Tensor& parameter : matrix->parameters()) parameters.push_back(parameter);
  }
  torch::optim::AdamW adam(parameters, torch::optim::AdamWOptions(options.lr).weight_decay(0));
  std::vector<int64_t> order(static_cast<size_t>(block.windows));
  std::iota(order.begin(), order.end(), 0);
  Rng rng(block.seed);
  std::vector<double> epochs;
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    shuffle(order, rng);
    double sum = 0;
    int64_t steps = 0;
    for (size_t first = 0; first < order.size(); first += size_t(options.batch), ++steps) {
      const auto batch = std::span(order).subspan(first, std::min(size_t(options.batch), order.size() - first));
      const Loss sums = loss_of(block, layer, batch);
      const at::Tensor loss = sums.error / sums.whole.clamp_min(1e-30);
      loss.backward();
      adam.step();
      drop_gradients(parameters);
      const double value = loss.item<double>();
      if (!std::isfinite(value))
        throw Error("{}: the loss is no longer a number in epoch {}; take a smaller {} than {}", trainee.name,
                    epoch + 1, trainee.rate_flag, options.lr);
      sum += value;
      block.after_windows(int64_t(batch.size()));
    }
    epochs.push_back(sum / double(std::max<int64_t>(1, steps)));
  }
  return epochs;
}

}  // namespace

TrainingReport train_block(const Block& block, const TrainingOptions& options, const Trainee& trainee,
                           Solutions& solutions) {
  const auto start = std::chrono::steady_clock::now();
  const DeviceMemory memory(block.net.device());
  TrainingReport report;
  report.before = lost(block, solutions);
  block.after_windows(block.windows);
  report.epochs = run_epochs(block, options, trainee);
  Solutions trained;
  {
    const c10::NoGradGuard no_grad;
    trained = trainee.solutions();
  }
  report.after = lost(block, trained);
  block.after_windows(block.windows);
  report.kept = report.after < report.before;
  if (report.kept) solutions = std::move(trained);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  report.device_bytes = memory.peak();
  return report;
}

at::Tensor quantize_on_range(const at::Tensor& W, const at::Tensor& low, const at::Tensor& high,
                             const solver::Grid& grid) {
  const at::Tensor w = solver::grouped(W, grid.group(W.size(1)));
  const double codes = double((1 << grid.bits) - 1), half = double(1 << (grid.bits - 1));
  const at::Tensor exact = grid.symmetric ? at::maximum(high / (half - 1), low / -half) : (high - low) / codes;
  const at::Tensor scale = straight_through(exact.to(at::kHalf).to(exact.scalar_type()), exact);
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
  return solver::ungrouped((code - zero) * scale, W.size(1));
}

}  // namespace lacuna::compress
