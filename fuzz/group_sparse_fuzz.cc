// gs layouts from any bytes: checked or refused with an Error; what passes the check decodes, and rows in another order
// pass it too. The input is the layout, group size and shape, then either the bytes of the matrix or (second kind)
// which groups are kept, with one byte of a good matrix changed.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "layout/gs.h"

namespace {

using namespace lacuna;

/// Bytes in a block of exactly their size, so that a step outside is seen.
struct Exact {
  size_t size;
  std::unique_ptr<std::byte[]> data{new std::byte[size]()};
  std::span<std::byte> bytes() { return {data.get(), size}; }
};

void use(const layout::Layout& l, layout::Shape shape, layout::Params params, std::span<const std::byte> bytes) {
  bool good = true;
  try {
    layout::check_bytes(l, shape, bytes, params);
  } catch (const Error&) {
    good = false;
  }
  std::vector<float> w(size_t(shape.N * shape.K));
  try {
    layout::decode_rows(l, shape, bytes, 0, shape.N, w.data(), params);
  } catch (const Error&) {
    if (good) std::abort();
  }
  if (!good) return;
  std::vector<int64_t> order(size_t(shape.N));
  std::iota(order.rbegin(), order.rend(), int64_t{0});
  Exact turned{bytes.size()};
  layout::permute_group_sparse_rows(l, shape, params, bytes, order, turned.bytes());
  layout::check_bytes(l, shape, turned.bytes(), params);
  std::vector<float> again(w.size());
  layout::decode_rows(l, shape, turned.bytes(), 0, shape.N, again.data(), params);
  for (int64_t n = 0; n < shape.N; ++n)
    if (std::memcmp(&again[size_t((shape.N - 1 - n) * shape.K)], &w[size_t(n * shape.K)], size_t(4 * shape.K)) != 0)
      std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kHead = 8;
  constexpr layout::Id kIds[] = {layout::Id::gs2, layout::Id::gs3, layout::Id::gs4, layout::Id::gs8, layout::Id::gs16};
  if (size < kHead) return 0;
  const layout::Layout& l = layout::get(kIds[data[0] % 5]);
  const layout::Shape shape{1 + data[2] % 9, 1 + data[3]};
  layout::Params params{.group_size = int64_t{8} << (data[1] % 5)};
  const std::span<const uint8_t> rest(data + kHead, size - kHead);
  try {
    if (data[1] < 128 || rest.empty()) {
      params.kept_groups = data[4];
      params.nnz = data[5] + 256 * (data[6] % 16);
      Exact matrix{size_t(l.size_bytes(shape, params))};
      std::memcpy(matrix.data.get(), rest.data(), std::min(rest.size(), matrix.size));
      use(l, shape, params, matrix.bytes());
      return 0;
    }
    const int64_t g = params.group_size, groups = (shape.K + g - 1) / g;
    const auto of = [&](int64_t i) { return rest[size_t(i) % rest.size()]; };
    std::vector<uint8_t> keep(size_t(shape.N * shape.K)), code(keep.size());
    std::vector<float> values(keep.size()), scale(size_t(shape.N * groups), 0.5f), zero(scale.size(), 1);
    for (int64_t n = 0; n < shape.N; ++n)
      for (int64_t k = 0; k < shape.K; ++k) {
        const auto at = size_t(n * shape.K + k);
        keep[at] = of(n * groups + k / g) % 2;
        code[at] = uint8_t(of(int64_t(at)) & ((1 << std::min(l.bits, 8)) - 1));
        values[at] = keep[at] != 0 ? code[at] : 0;
      }
    std::vector<std::byte> good;
    params = l.bits == 16 ? layout::pack_values(l, shape, params, values, keep, good)
                          : layout::pack_grouped(l, shape, params, {code, scale, zero, keep}, good);
    Exact matrix{good.size()};
    std::memcpy(matrix.data.get(), good.data(), good.size());
    use(l, shape, params, matrix.bytes());
    matrix.bytes()[size_t(data[4] + 256 * data[5]) % matrix.size] ^= std::byte(data[6]);
    use(l, shape, params, matrix.bytes());
  } catch (const Error&) {
  }
  return 0;
}
