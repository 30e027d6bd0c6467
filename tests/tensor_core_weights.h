// tests/tensor_core_weights.h - random weights in f8, nm24_f8 and nm24_bf16.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/rng.h"
#include "layout/layout.h"
#include "layout/tensor_core.h"
#include "layout/two_of_four.h"

namespace lacuna::test {

struct TensorCoreWeight {
  const layout::Layout* layout = nullptr;
  layout::Shape shape;
  std::vector<float> w;       // [N, K] before the mask
  std::vector<uint8_t> keep;  // [N, K]; empty: all
  std::vector<std::byte> bytes;
  std::vector<float> decoded;  // [N, K]
};

inline std::vector<layout::Id> tensor_core_layouts() {
  std::vector<layout::Id> out;
  for (const layout::Layout& l : layout::all())
    if (l.family == layout::Family::tensor_core) out.push_back(l.id);
  return out;
}

/// Rows of different magnitude, the third one zero; any two of each four are kept.
inline TensorCoreWeight tensor_core_weight(layout::Id id, int64_t N, int64_t K, uint64_t seed) {
  TensorCoreWeight out{&layout::get(id), {N, K}, std::vector<float>(size_t(N * K)), {}, {}, {}};
  Rng rng(seed * 977 + uint64_t(N * 100003 + K));
  for (int64_t n = 0; n < N; ++n)
    for (int64_t k = 0; k < K; ++k)
      out.w[size_t(n * K + k)] = n == 2 ? 0.0f : float(rng.normal() * std::exp2(double(n % 7) - 9));
  if (layout::tensor_core_row(*out.layout, K).sparse) {
    std::vector<float> score(static_cast<size_t>(K));
    out.keep.resize(out.w.size());
    for (int64_t n = 0; n < N; ++n) {
      for (float& value : score) value = float(rng.uniform());
      layout::keep_largest(score, std::span(out.keep).subspan(size_t(n * K), size_t(K)));
    }
  }
  out.bytes.resize(size_t(out.layout->size_bytes(out.shape)));
  layout::encode_tensor_core(*out.layout, out.shape, out.w, out.keep, out.bytes);
  out.decoded.resize(out.w.size());
  layout::decode_rows(*out.layout, out.shape, out.bytes, 0, N, out.decoded.data());
  return out;
}

}  // namespace lacuna::test
