#include "solver/solve.h"

#include <c10/core/GradMode.h>

#include <cmath>
#include <string>

#include "core/error.h"
#include "solver/awp.h"
#include "solver/awp_plus.h"
#include "solver/awq.h"
#include "solver/check.h"
#include "solver/gptq.h"
#include "solver/gqsa.h"
#include "solver/magnitude.h"
#include "solver/omniquant.h"
#include "solver/rtn.h"
#include "solver/sparsegpt.h"
#include "solver/wanda.h"

namespace lacuna::solver {
namespace {

using Does = Method::Does;
using Kind = Pattern::Kind;

constexpr Method kMethods[] = {
    {"magnitude", "drops the smallest |w|", Does::prune, Kind::unstructured, nullptr, magnitude},
    {"wanda", "drops the smallest |w| times its input's norm", Does::prune, Kind::row, nullptr, wanda},
    {"sparsegpt", "column sweep that drops, with bits also rounds", Does::prune_or_both, Kind::unstructured, nullptr,
     sparsegpt, true},
    {"rtn", "rounds to nearest", Does::quantize, Kind::none, nullptr, rtn},
    {"gptq", "column sweep that rounds", Does::quantize, Kind::none, nullptr, gptq, true},
    {"awq", "rounds with searched input scales and ranges", Does::quantize, Kind::none, awq_scale, awq, false, false,
     true},
    {"omniquant", "rounds to nearest on ranges that are learned layer by layer", Does::quantize, Kind::none, nullptr,
     omniquant, false, false, false, true},
    {"awq+wanda", "awq, then wanda's mask", Does::both, Kind::row, awq_scale, awq_wanda, false, false, true},
    {"wanda+awq", "wanda's mask, then awq", Does::both, Kind::row, wanda_awq_scale, wanda_awq, false, false, true},
    {"gqsa", "drops whole groups of inputs by their saliency, rounds the rest", Does::prune_or_both, Kind::groups,
     nullptr, gqsa, true},
    {"awp", "projected gradient descent, as published", Does::either_or_both, Kind::row, nullptr, awp, false, true},
    {"awp+", "preconditioned iterations, least squares, coordinate descent", Does::either_or_both, Kind::row, nullptr,
     awp_plus, true, false, true},
};

/// The problem with C multiplied by a power of two that brings its diagonal's mean near 1 where it is so far from it
/// that squares leave float32's range. Nothing else changes: the solvers' answers do not depend on C's unit.
struct InRange {
  Problem problem;
  double factor = 1;
};

InRange in_range(const Problem& problem) {
  const double mean = problem.stats.second_moment.diagonal().mean(at::kDouble).item<double>();
  if (mean == 0 || (mean > 1e-12 && mean < 1e12)) return {problem, 1};
  const int exponent = -std::ilogb(mean);
  InRange result{problem, std::ldexp(1.0, exponent)};
  at::Tensor& C = result.problem.stats.second_moment;
  C = (C * std::ldexp(1.0, exponent / 2)) * std::ldexp(1.0, exponent - exponent / 2);
  return result;
}

InRange checked(const Method& method, const Problem& problem) {
  check_blas();
  check_problem(method, problem);
  return in_range(problem);
}

}  // namespace

std::span<const Method> methods() { return kMethods; }

const Method& method(std::string_view name) {
  std::string known;
  for (const Method& one : kMethods) {
    if (one.name == name) return one;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", one.name);
  }
  throw Error("no method is called '{}'; there are {}", name, known);
}

Solution solve(std::string_view name, const Problem& problem) {
  const c10::NoGradGuard no_grad;
  const Method& chosen = method(name);
  const InRange scaled = checked(chosen, problem);
  Solution solution = chosen.run(scaled.problem);
  if (!solution.weight.isfinite().all().item<bool>())
    throw Error(
        "method {} left float32's range on a matrix of {} x {}: its second moment is too uneven; gather it with more "
        "tokens, or take another method",
        name, problem.W.size(0), problem.W.size(1));
  for (double& value : solution.curve) value /= std::sqrt(scaled.factor);
  return solution;
}

at::Tensor input_scale(const Method& method, const Problem& problem) {
  const c10::NoGradGuard no_grad;
  return method.input_scale(checked(method, problem).problem);
}

double loss(const at::Tensor& W, const at::Tensor& Theta, const at::Tensor& C) {
  const at::Tensor difference = W - Theta;
  return (difference.matmul(C) * difference).sum(at::kDouble).item<double>();
}

at::Tensor effective(const Solution& solution) {
  return solution.input_scale.defined() ? solution.weight / solution.input_scale : solution.weight;
}

}  // namespace lacuna::solver
