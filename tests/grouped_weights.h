// tests/grouped_weights.h - random weights in the layouts whose inputs share scales in groups along a row.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/rng.h"
#include "core/scalar.h"
#include "layout/grouped.h"
#include "layout/gs.h"
#include "layout/layout.h"

namespace lacuna::test {

struct GroupedWeight {
  const layout::Layout* layout = nullptr;
  layout::Shape shape;
  layout::Params params;
  std::vector<std::byte> bytes;
  std::vector<uint8_t> keep;   // [N, K]
  std::vector<float> decoded;  // [N, K]
  std::vector<float> largest;  // [N, K] |scale| * (largest code + |zero|): what a kernel's sums may pass through
};

struct GroupedOptions {
  int64_t group_size = 128;
  double sparsity = 0;         // bm, gs
  bool whole_zeros = true;     // zeros are codes, as they always are in gs
  int64_t dropped_row = -1;    // bm, gs: this row keeps nothing
  int64_t dropped_input = -1;  // bm: no row keeps this one; nm24_q4: nor its neighbour; gs: nor its group
};

/// nm24_q4 has its own grid and sparsity, gs groups of 16 where it cannot have those that are asked for.
inline GroupedWeight grouped_weight(layout::Id id, int64_t N, int64_t K, uint64_t seed, const GroupedOptions& options) {
  using namespace layout;
  GroupedWeight out;
  out.layout = &get(id);
  out.shape = {N, K};
  const Family family = out.layout->family;
  const bool two_of_four = family == Family::two_of_four, values = out.layout->bits == 16;
  const bool group_sparse = family == Family::group_sparse;
  const int64_t group_size = two_of_four                                            ? 64
                             : group_sparse && !is_sparse_group(options.group_size) ? 16
                                                                                    : options.group_size;
  const int64_t groups = group_count(K, group_size), g = whole_group(K, group_size);
  Rng rng(seed ^ uint64_t(id) << 32);
  const uint64_t levels = values ? 1 : uint64_t{1} << out.layout->bits;
  std::vector<uint8_t> code(size_t(N * K));
  std::vector<float> scale(size_t(N * groups)), zero(scale.size()), w(code.size());
  out.keep.assign(code.size(), 1);
  for (size_t i = 0; i < scale.size(); ++i) {
    scale[i] = to_float(to_f16(float(rng.normal() * 0.01)));
    const double z =
        two_of_four ? 8.0 : double(rng.below(levels)) + (options.whole_zeros || group_sparse ? 0.0 : rng.normal());
    zero[i] = to_float(to_f16(float(z)));
  }
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      const auto i = size_t(n * K + k), at = size_t(n * groups + k / g);
      code[i] = uint8_t(rng.below(levels));
      w[i] = to_float(to_f16(float(rng.normal() * 0.02)));
      if (family == Family::bitmask)
        out.keep[i] = rng.uniform() >= options.sparsity && n != options.dropped_row && k != options.dropped_input;
      out.largest.push_back(values ? std::abs(w[i]) : std::abs(scale[at]) * (float(levels - 1) + std::abs(zero[at])));
    }
    for (int64_t k = 0; group_sparse && k < K; k += g)
      if (rng.uniform() < options.sparsity || n == options.dropped_row ||
          (options.dropped_input >= 0 && options.dropped_input / g == k / g))
        std::fill_n(&out.keep[size_t(n * K + k)], std::min(g, K - k), uint8_t{0});
    for (int64_t k = 0; two_of_four && k < K; k += 4) {
      const int64_t first = options.dropped_input / 4 == k / 4 && options.dropped_input >= 0
                                ? k + (options.dropped_input % 4 + 1) % 4
                                : k + int64_t(rng.below(4));
      const int64_t second = k + (first - k + 1) % 4;
      for (int64_t i = k; i < k + 4; ++i) out.keep[size_t(n * K + i)] = i == first || i == second;
    }
  }
  const std::span<const uint8_t> mask = family == Family::grouped ? std::span<const uint8_t>() : out.keep;
  out.params =
      values ? pack_values(*out.layout, out.shape, {.group_size = group_sparse ? group_size : 0}, w, mask, out.bytes)
             : pack_grouped(*out.layout, out.shape, {.group_size = group_size}, {code, scale, zero, mask}, out.bytes);
  out.decoded.resize(code.size());
  decode_rows(*out.layout, out.shape, out.bytes, 0, N, out.decoded.data(), out.params);
  return out;
}

inline std::vector<layout::Id> grouped_layouts() {
  std::vector<layout::Id> out;
  for (const layout::Layout& l : layout::all())
    if (l.family != layout::Family::rows && l.family != layout::Family::tensor_core && !l.zigzag) out.push_back(l.id);
  return out;
}

}  // namespace lacuna::test
