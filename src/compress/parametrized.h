// src/compress/parametrized.h - products with matrices that are functions of trained parameters, without a dense matrix
// in the graph: rows of it are made when they are needed, and made again for the gradients.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace lacuna::compress {

/// A matrix W [N, K] whose rows are functions of a part of each parameter.
class Parametrized {
 public:
  Parametrized() = default;
  Parametrized(const Parametrized&) = default;
  Parametrized(Parametrized&&) = default;
  Parametrized& operator=(const Parametrized&) = default;
  Parametrized& operator=(Parametrized&&) = default;
  virtual ~Parametrized() = default;

  virtual int64_t N() const = 0;
  virtual int64_t K() const = 0;
  /// Leaves that have gradients; every one's dimension 0 is divided among the rows, in their order.
  virtual std::vector<at::Tensor> parameters() const = 0;
  /// {where in dimension 0 the part of these rows begins, how long it is}.
  virtual std::pair<int64_t, int64_t> part(int64_t first, int64_t rows) const { return {first, rows}; }
  /// Rows first .. first + rows of W: [rows, K], from that part of each of parameters(), with gradients to them.
  virtual at::Tensor rows(int64_t first, int64_t rows, const std::vector<at::Tensor>& parts) const = 0;

  /// All of W, its whole graph kept.
  at::Tensor weight() const { return rows(0, N(), parameters()); }
};

/// x W^T, x: [.., K] -> [.., N], with gradients to x and to the parameters. In memory are x and, while it computes,
/// most_weights of W (at least a row) and their graph. W must outlive the graph.
at::Tensor product(const at::Tensor& x, const Parametrized& W, int64_t most_weights = int64_t{1} << 23);

}  // namespace lacuna::compress
