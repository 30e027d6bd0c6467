// tests/solver/problems.h - random layers: weights, and inputs that are correlated and have outlier channels.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/rng.h"
#include "solver/solve.h"

namespace lacuna::test {

inline at::Tensor random_weights(int64_t N, int64_t K, uint64_t seed) {
  Rng rng(seed);
  at::Tensor W = at::empty({N, K}, at::kFloat);
  for (int64_t i = 0; i < N * K; ++i) W.data_ptr<float>()[i] = float(0.05 * rng.normal());
  return W;
}

/// Inputs from an autoregressive process over the channels, x_j = rho x_(j-1) + noise, channel j scaled by a lognormal
/// factor, every 17th one by 20 more.
inline solver::Statistics correlated_inputs(int64_t K, int64_t tokens, uint64_t seed, double rho = 0.9) {
  Rng rng(seed ^ 0x5eed);
  std::vector<double> scale(static_cast<size_t>(K));
  for (int64_t j = 0; j < K; ++j) scale[size_t(j)] = std::exp(0.5 * rng.normal()) * (j % 17 == 5 ? 20 : 1);
  at::Tensor X = at::empty({tokens, K}, at::kDouble);
  for (int64_t t = 0; t < tokens; ++t) {
    double x = rng.normal();
    for (int64_t j = 0; j < K; ++j) {
      x = rho * x + std::sqrt(1 - rho * rho) * rng.normal();
      X.data_ptr<double>()[t * K + j] = x * scale[size_t(j)];
    }
  }
  solver::Statistics stats;
  stats.second_moment = (X.t().matmul(X) / double(tokens)).to(at::kFloat).contiguous();
  stats.mean_abs = X.abs().mean({0}).to(at::kFloat).contiguous();
  stats.tokens = tokens;
  return stats;
}

inline solver::Problem random_problem(int64_t N, int64_t K, uint64_t seed) {
  solver::Problem problem;
  problem.W = random_weights(N, K, seed);
  problem.stats = correlated_inputs(K, 4 * K + 64, seed);
  return problem;
}

inline solver::Pattern row_pattern(double sparsity) { return {solver::Pattern::Kind::row, sparsity}; }
inline solver::Pattern unstructured_pattern(double sparsity) { return {solver::Pattern::Kind::unstructured, sparsity}; }
inline solver::Pattern n_m_pattern(int64_t n, int64_t m) {
  return {solver::Pattern::Kind::n_m, 1 - double(n) / double(m), n, m};
}
inline solver::Pattern group_pattern(int64_t group, double sparsity) {
  return {solver::Pattern::Kind::groups, sparsity, 0, 0, group};
}

inline double lost(const solver::Problem& problem, const solver::Solution& solution) {
  return solver::loss(problem.W, solver::effective(solution), problem.stats.second_moment);
}

/// A plain copy, for references in double: element [i, j] at i * columns + j.
inline std::vector<double> values(const at::Tensor& t) {
  const at::Tensor d = t.to(at::kDouble).contiguous();
  return {d.data_ptr<double>(), d.data_ptr<double>() + d.numel()};
}

inline at::Tensor matrix(int64_t rows, int64_t columns, const std::vector<float>& v) {
  return at::tensor(v).reshape({rows, columns}).contiguous();
}

}  // namespace lacuna::test
