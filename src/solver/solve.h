// src/solver/solve.h - every solver by its name.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "solver/problem.h"

namespace lacuna::solver {

/// How a joint projection is composed (AWP, section 3).
enum class Order : uint8_t {
  prune_first,     // mask, the grid fitted to the pruned values, mask again
  quantize_first,  // grid, then the mask on the rounded values
};

struct Options {
  double damping = 0.01;      // gptq, sparsegpt, awp+: share of the mean of C's diagonal added to it
  int64_t block = 128;        // gptq, sparsegpt: columns between two updates of all that lies right of them
  bool search_ranges = true;  // awq, awp+: a group's grid may cover less than its weights span; awp+ refits scales
  Order order = Order::prune_first;  // awp, joint
};

struct Problem {
  at::Tensor W;  // [N, K] float32
  Statistics stats;
  Grid grid;
  Pattern pattern;
  Options options;
};

struct Method {
  std::string_view name, summary;
  enum class Does : uint8_t { prune, quantize, both, prune_or_both, either_or_both } does;
  Pattern::Kind usual;  // the pattern its paper prunes with; none where it does not prune
  /// Of a method that scales inputs: its answer's input_scale alone, which is what takes mean |x|; else nullptr.
  at::Tensor (*input_scale)(const Problem&);
  Solution (*run)(const Problem&);
  /// Whether it heeds Options::damping, Options::order where it does both, Options::search_ranges where it rounds.
  bool damped = false, ordered = false, ranged = false;
  /// Whether its answer is where training of ranges begins (compress/omniquant.h), and not yet the method's.
  bool learns_ranges = false;
};

/// In the order of tables: baselines first.
std::span<const Method> methods();
/// Throws Error with the names that exist.
const Method& method(std::string_view name);

/// Checks the problem, solves it. Throws Error: values that are not finite, shapes that do not fit each other, a method
/// asked for what it does not do, a C that no damping makes positive definite.
Solution solve(std::string_view name, const Problem& problem);

/// solve(name, problem).input_scale of a method that scales inputs, without what comes after the search for it.
at::Tensor input_scale(const Method& method, const Problem& problem);

/// tr((W - Theta) C (W - Theta)^T), summed in double.
double loss(const at::Tensor& W, const at::Tensor& Theta, const at::Tensor& C);

/// The weight that takes the layer's own input: weight / input_scale.
at::Tensor effective(const Solution& solution);

}  // namespace lacuna::solver
