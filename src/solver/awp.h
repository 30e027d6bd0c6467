// src/solver/awp.h - AWP (arXiv:2506.10205): projected gradient descent on the activation-aware loss.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

#include "solver/solve.h"

namespace lacuna::solver {

struct Descent {
  double eta = 1;
  int iterations = 200;
  double tolerance = 0;  // stops where ||2 (W - Theta) C||_F / ||W||_F is below it
};

struct Descended {
  at::Tensor theta;
  int iterations = 0;         // projections done
  std::vector<double> curve;  // ||(W - Theta_t) C^(1/2)||_F / ||W||_F, t = 0 .. iterations
};

/// Algorithm 1: Z = Theta + eta (W - Theta) C; Theta = project(Z, t), t = 1, 2, ...: without the factor 2 of equation
/// 9, with which outlier channels diverge. theta: where it starts.
Descended descend(const at::Tensor& W, const at::Tensor& C, at::Tensor theta, const Descent& descent,
                  const std::function<at::Tensor(const at::Tensor& Z, int t)>& project);

/// The paper's settings (section 4):
///   pruning      eta = 2 / ||C||_F from Wanda's answer, tolerance 1e-4, at most 200 iterations (usual)
///   quantizing   eta = 1.5 / ||C||_F from RTN's answer, 10 iterations, the grid refitted in each
///   both         eta = 1.5 / ||C||_F from W, 100 iterations: 1-25 prune p t / 25, 26-50 prune p, 51-100 prune p and
///                round in the order of options.order; the last mask is the answer's. Never stops early.
Solution awp(const Problem& problem);

}  // namespace lacuna::solver
