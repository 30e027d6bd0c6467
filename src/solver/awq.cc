#include "solver/awq.h"

#include <algorithm>
#include <limits>

#include "solver/project.h"
#include "solver/wanda.h"

namespace lacuna::solver {
namespace {

struct Scaled {
  Rounded rounded;         // of W s
  at::Tensor input_scale;  // s: [K]
};

/// mean_abs in units of its mean.
at::Tensor scale_of(const at::Tensor& mean_abs, double alpha) {
  const at::Tensor s = mean_abs.pow(alpha).clamp_min_(1e-4);
  return s / (s.max() * s.min()).sqrt();
}

/// The limit of |w| of every group, [N, groups], that loses least within the group.
at::Tensor search_clip(const at::Tensor& W, const at::Tensor& C, const Grid& grid) {
  constexpr int kSteps = 20, kTried = 10;
  const int64_t K = W.size(1), size = grid.group(K);
  const at::Tensor largest = grouped(W, size).abs().amax({2});
  at::Tensor best = largest.clone();
  for (int64_t g = 0; g < grid.groups(K); ++g) {
    const int64_t first = g * size, length = std::min(size, K - first);
    const at::Tensor w = W.narrow(1, first, length), c = C.narrow(0, first, length).narrow(1, first, length);
    at::Tensor least = at::full({W.size(0)}, std::numeric_limits<float>::infinity(), W.options());
    at::Tensor chosen = largest.select(1, g).clone();
    for (int i = 0; i < kTried; ++i) {
      const at::Tensor limit = largest.select(1, g) * (1 - double(i) / kSteps);
      const Grid whole{grid.bits, 0, grid.symmetric};
      const Rounded rounded = round_to_grid(w, whole, fit_grid(w, whole, limit.unsqueeze(1)));
      const at::Tensor difference = w - decode(rounded, whole);
      const at::Tensor lost = (difference.matmul(c) * difference).sum(1);
      const at::Tensor better = lost < least;
      least = at::where(better, lost, least);
      chosen = at::where(better, limit, chosen);
    }
    best.select(1, g).copy_(chosen);
  }
  return best;
}

/// The input scales of W, which may have been pruned already.
at::Tensor search_scale(const Problem& problem, const at::Tensor& W) {
  constexpr int kAlphas = 20;
  const at::Tensor& C = problem.stats.second_moment;
  const Grid& grid = problem.grid;
  const double mean = problem.stats.mean_abs.mean(at::kDouble).item<double>();
  const at::Tensor mean_abs = mean > 0 ? problem.stats.mean_abs / mean : at::ones_like(problem.stats.mean_abs);
  if (mean_abs.max().equal(mean_abs.min())) return at::ones_like(mean_abs);  // of every power
  at::Tensor scale;
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kAlphas; ++i) {
    const at::Tensor tried = scale_of(mean_abs, double(i) / kAlphas), scaled = W * tried;
    const double lost = loss(W, decode(round_to_grid(scaled, grid, fit_grid(scaled, grid)), grid) / tried, C);
    if (lost < least) {
      least = lost;
      scale = tried;
    }
  }
  return scale;
}

/// AWQ of W, which may have been pruned already.
Scaled quantize(const Problem& problem, const at::Tensor& W) {
  const at::Tensor& C = problem.stats.second_moment;
  const Grid& grid = problem.grid;
  const at::Tensor scale = search_scale(problem, W), scaled = W * scale;
  at::Tensor limit;
  if (problem.options.search_ranges) limit = search_clip(scaled, C / scale.unsqueeze(1) / scale, grid);
  return {round_to_grid(scaled, grid, fit_grid(scaled, grid, limit)), scale};
}

at::Tensor wanda_keep(const Problem& problem) {
  return keep_mask(wanda_score(problem.W, problem.stats.second_moment), problem.pattern);
}

Solution stored(const Scaled& scaled, const Grid& grid, const at::Tensor& keep) {
  Solution solution = solver::stored(scaled.rounded, grid, keep);
  solution.input_scale = scaled.input_scale.contiguous();
  return solution;
}

}  // namespace

Solution awq(const Problem& problem) { return stored(quantize(problem, problem.W), problem.grid, {}); }

Solution awq_wanda(const Problem& problem) {
  const Scaled scaled = quantize(problem, problem.W);
  const at::Tensor decoded = decode(scaled.rounded, problem.grid) / scaled.input_scale;
  const at::Tensor keep = keep_mask(wanda_score(decoded, problem.stats.second_moment), problem.pattern);
  return stored(scaled, problem.grid, keep);
}

Solution wanda_awq(const Problem& problem) {
  const at::Tensor keep = wanda_keep(problem);
  return stored(quantize(problem, masked(problem.W, keep)), problem.grid, keep);
}

at::Tensor awq_scale(const Problem& problem) { return search_scale(problem, problem.W); }

at::Tensor wanda_awq_scale(const Problem& problem) {
  return search_scale(problem, masked(problem.W, wanda_keep(problem)));
}

}  // namespace lacuna::solver
