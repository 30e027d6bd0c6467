// tests/matrices.h - random matrices in any layout.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/rng.h"
#include "grouped_weights.h"
#include "layout/layout.h"
#include "layout/zigzag.h"
#include "tensor_core_weights.h"

namespace lacuna::test {

struct Matrix {
  const layout::Layout* layout = nullptr;
  layout::Shape shape;
  layout::Params params;
  std::vector<std::byte> bytes;

  std::vector<float> decoded() const {
    std::vector<float> out(size_t(shape.N * shape.K), 12345.0f);
    layout::decode_rows(*layout, shape, bytes, 0, shape.N, out.data(), params);
    return out;
  }
};

/// Random weights; params: of gq, bm, gs and zigzag layouts.
inline Matrix random_matrix(layout::Id id, layout::Shape shape, layout::Params params, uint64_t seed = 5) {
  const layout::Layout& stored = layout::get(id);
  if (stored.family == layout::Family::tensor_core)
    return {&stored, shape, {}, tensor_core_weight(id, shape.N, shape.K, seed).bytes};
  if (stored.family != layout::Family::rows && !stored.zigzag) {
    GroupedWeight made = grouped_weight(id, shape.N, shape.K, seed,
                                        {.group_size = params.group_size, .sparsity = 0.4, .dropped_row = shape.N / 2});
    return {&stored, shape, made.params, std::move(made.bytes)};
  }
  Rng rng(seed);
  std::vector<float> w(size_t(shape.N * shape.K));
  for (float& value : w) value = float(rng.normal());
  Matrix out{&stored, shape, params, std::vector<std::byte>(size_t(stored.size_bytes(shape, params)))};
  if (stored.zigzag) {
    for (int64_t r = 0; r < layout::super_rows(shape.N); ++r)
      layout::encode_zigzag(stored, shape, params, r, &w[size_t(r * layout::kSuperRows * shape.K)], {}, out.bytes);
    return out;
  }
  const auto row = size_t(stored.row_bytes(shape.K)), K = size_t(shape.K);
  for (size_t n = 0; n < size_t(shape.N); ++n)
    stored.encode_row(stored, std::span(w).subspan(n * K, K), {}, std::span(out.bytes).subspan(n * row, row));
  return out;
}

}  // namespace lacuna::test
