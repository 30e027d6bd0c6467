#include "solver/check.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/rng.h"

namespace lacuna::solver {
namespace {

std::string shape(const at::Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += fmt::format("{}{}", d ? ", " : "", t.size(d));
  return text + "]";
}

void check_tensor(std::string_view what, const at::Tensor& t, at::IntArrayRef sizes, const at::Tensor& like) {
  if (!t.defined()) throw Error("{}: missing", what);
  if (t.sizes() != sizes) {
    throw Error("{}: expected shape {}, got {}", what, shape(at::empty(sizes, at::kByte)), shape(t));
  }
  if (t.scalar_type() != at::kFloat || !t.is_contiguous()) throw Error("{}: must be contiguous float32", what);
  if (t.device() != like.device()) {
    throw Error("{}: on {}, but the weights are on {}", what, t.device().str(), like.device().str());
  }
}

void check_finite(std::string_view what, const at::Tensor& t) {
  const at::Tensor bad = t.isfinite().logical_not();
  if (!bad.any().item<bool>()) return;
  const at::Tensor where = bad.nonzero()[0].to(at::kCPU);
  std::string place;
  for (int64_t d = 0; d < where.size(0); ++d) place += fmt::format("{}{}", d ? ", " : "", where[d].item<int64_t>());
  throw Error("{}: {} of {} values are not finite, the first at [{}]; find where they come from, nothing is compressed",
              what, bad.sum().item<int64_t>(), t.numel(), place);
}

void check_pattern(const Pattern& pattern) {
  if (!(pattern.sparsity >= 0 && pattern.sparsity < 1)) {
    throw Error("sparsity {}: it must be at least 0 and less than 1", pattern.sparsity);
  }
  if (pattern.kind == Pattern::Kind::n_m && (pattern.n < 1 || pattern.m < pattern.n)) {
    throw Error("pattern {}:{}: n of m consecutive weights stay, 1 <= n <= m", pattern.n, pattern.m);
  }
  if (pattern.kind == Pattern::Kind::groups && pattern.group < 1) {
    throw Error("pattern group{}: a group has at least 1 weight", pattern.group);
  }
}

void check_does(const Method& method, bool prune, bool quantize) {
  switch (method.does) {
    case Method::Does::prune:
      if (quantize)
        throw Error("method {} drops weights and does not round them; leave --bits out, or try awp+", method.name);
      if (!prune) throw Error("method {} drops weights; give --sparsity or a pattern N:M", method.name);
      break;
    case Method::Does::quantize:
      if (prune)
        throw Error("method {} rounds weights and drops none; leave --sparsity and --pattern out, or try awp+",
                    method.name);
      if (!quantize) throw Error("method {} rounds weights; give --bits", method.name);
      break;
    case Method::Does::both:
      if (!prune || !quantize)
        throw Error("method {} drops and rounds weights; give --sparsity and --bits", method.name);
      break;
    case Method::Does::prune_or_both:
      if (!prune) throw Error("method {} drops weights; give --sparsity, or take gptq to round only", method.name);
      break;
    case Method::Does::either_or_both:
      if (!prune && !quantize) throw Error("method {}: nothing to do; give --sparsity, --bits or both", method.name);
      break;
  }
}

}  // namespace

void check_request(const Method& method, const Grid& grid, const Pattern& pattern) {
  check_does(method, pattern.kind != Pattern::Kind::none, grid.bits != 0);
  if (grid.bits != 0 && (grid.bits < 1 || grid.bits > 8)) throw Error("{} bits: 1 to 8 can be stored", grid.bits);
  if (grid.group_size < 0) throw Error("group size {}: it must be at least 1, or 0 for whole rows", grid.group_size);
  check_pattern(pattern);
}

void check_problem(const Method& method, const Problem& problem) {
  check_request(method, problem.grid, problem.pattern);
  const Options& options = problem.options;
  if (!(options.damping >= 0 && options.damping <= 10)) {
    throw Error("damping {}: a share of the mean of the second moment's diagonal, 0 to 10", options.damping);
  }
  if (options.block < 1) throw Error("block {}: at least one column", options.block);

  const at::Tensor& W = problem.W;
  if (!W.defined() || W.dim() != 2 || W.numel() == 0) {
    throw Error("weight: expected a matrix, got shape {}", W.defined() ? shape(W) : "none");
  }
  const int64_t K = W.size(1);
  check_tensor("weight", W, {W.size(0), K}, W);
  check_finite("weight", W);
  const at::Tensor& C = problem.stats.second_moment;
  check_tensor("second moment", C, {K, K}, W);
  check_finite("second moment", C);
  const double largest = C.diagonal().max().item<double>(), least = C.diagonal().min().item<double>();
  if (least < 0) throw Error("second moment: {} on its diagonal, where mean squares belong", least);
  const double uneven = (C - C.t()).abs_().max().item<double>();
  if (uneven > 1e-3 * largest)
    throw Error("second moment: not symmetric, [i, j] and [j, i] differ by up to {}", uneven);
  if (method.input_scale != nullptr) {
    check_tensor("mean |x|", problem.stats.mean_abs, {K}, W);
    check_finite("mean |x|", problem.stats.mean_abs);
  }
}

void check_product(const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& multiply) {
  constexpr int64_t kSize = 256;
  Rng rng(256);
  const at::Tensor a = at::empty({kSize, kSize}, at::kFloat), b = at::empty({kSize, kSize}, at::kFloat);
  float* pa = a.data_ptr<float>();
  float* pb = b.data_ptr<float>();
  for (int64_t i = 0; i < kSize * kSize; ++i) pa[i] = float(rng.uniform() - 0.5), pb[i] = float(rng.uniform() - 0.5);
  const at::Tensor product = multiply(a, b).contiguous();
  const float* pc = product.data_ptr<float>();
  std::vector<double> row(kSize);
  for (int64_t i = 0; i < kSize; ++i) {
    std::fill(row.begin(), row.end(), 0.0);
    for (int64_t k = 0; k < kSize; ++k) {
      for (int64_t j = 0; j < kSize; ++j) row[size_t(j)] += double(pa[i * kSize + k]) * double(pb[k * kSize + j]);
    }
    for (int64_t j = 0; j < kSize; ++j) {
      const double bound = 0.25 * kSize * kSize * 0x1p-24;  // K eps sum |a b|, |a|, |b| <= 1/2
      if (!(std::fabs(double(pc[i * kSize + j]) - row[size_t(j)]) <= bound)) {
        throw Error(
            "matrix products are wrong on this processor: [{}, {}] of a 256 x 256 product is {}, expected {}; the BLAS "
            "library does not know this processor: set OPENBLAS_CORETYPE (SkylakeX where it has AVX-512, else Haswell)",
            i, j, pc[i * kSize + j], row[size_t(j)]);
      }
    }
  }
}

void check_blas() {
  static std::once_flag once;
  std::call_once(once,
                 [] { check_product([](const at::Tensor& a, const at::Tensor& b) { return at::matmul(a, b); }); });
}

double product_gflops() {
  constexpr int64_t kSize = 512;
  const at::Tensor a = at::ones({kSize, kSize}, at::kFloat);
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const auto start = std::chrono::steady_clock::now();
    at::matmul(a, a);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2e-9 * double(kSize * kSize * kSize) / taken.count());
  }
  return best;
}

}  // namespace lacuna::solver
