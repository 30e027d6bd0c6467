// src/solver/problem.h - what a layer-wise solver is asked and what it answers.
//
// A linear layer computes y = x W^T; W: [N, K]. Solvers minimise the activation-aware loss ||(W - Theta) C^(1/2)||_F^2
// = tr((W - Theta) C (W - Theta)^T) over a set of allowed Theta (AWP, equation 3), where C = X X^T / n is the second
// moment of the layer's n calibration inputs. They are pure functions: no files, no models, the same answer for the
// same arguments, seed and device. Tensors are float32 and contiguous, on one device, which the answer shares.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lacuna::solver {

/// Integers along a row: weight = scale * (code - zero), codes 0 .. 2^bits - 1, one scale and one zero for
/// every group of group_size inputs. Scales and zeros are values that f16 holds exactly, so that packing changes
/// nothing.
struct Grid {
  int bits = 0;              // 2, 3, 4, 8; 0: not quantized
  int64_t group_size = 128;  // inputs; the last group of a row may be shorter; 0: the whole row
  bool symmetric = false;    // every zero is half of the codes, 2^(bits - 1)

  int64_t group(int64_t K) const { return group_size <= 0 || group_size > K ? K : group_size; }
  int64_t groups(int64_t K) const { return (K + group(K) - 1) / group(K); }
};

/// Which weights are dropped.
struct Pattern {
  enum class Kind : uint8_t {
    none,
    row,           // floor(sparsity * K) of every row
    unstructured,  // floor(sparsity * N * K) of the matrix
    n_m,           // all but n of every m consecutive inputs
    groups,        // floor(sparsity * number of groups) whole groups of `group` inputs, ranked over the matrix
  };
  Kind kind = Kind::none;
  double sparsity = 0;   // share dropped, 0 <= sparsity < 1; n_m: 1 - n / m
  int64_t n = 0, m = 0;  // n_m
  int64_t group = 16;    // groups
};

/// What the calibration text says about a layer's inputs.
struct Statistics {
  at::Tensor second_moment;  // C: [K, K], symmetric
  at::Tensor mean_abs;       // [K], mean |x_j|
  int64_t tokens = 0;
};

/// A solver's answer. weight is what the stored form decodes to; codes, scale and zero are there where grid.bits > 0,
/// keep where the pattern drops weights. Dropped weights are +0 in weight; their codes are 0.
/// Where input_scale is there (AWQ), the layer is y = (x / input_scale) weight^T: the division is folded into what
/// makes x, or done on x. Folded or not, the layer's own weight is weight / input_scale (solver/solve.h, effective()).
struct Solution {
  at::Tensor weight;       // [N, K]
  at::Tensor keep;         // [N, K] bool, or undefined: all
  at::Tensor code;         // [N, K] uint8, or undefined
  at::Tensor scale, zero;  // [N, groups], or undefined
  at::Tensor input_scale;  // [K], positive, or undefined
  at::Tensor unrounded;    // [N, K], what was rounded where that is not W itself, or undefined
  int iterations = 0;
  /// ||(W - Theta_t) C^(1/2)||_F / ||W||_F (AWP, Figure 1): entry 0 at the start, entry t after iteration t, where the
  /// solver iterates; else empty.
  std::vector<double> curve;
};

}  // namespace lacuna::solver
