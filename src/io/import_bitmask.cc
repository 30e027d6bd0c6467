#include "io/import_bitmask.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/scalar.h"
#include "io/import_tensors.h"
#include "layout/grouped.h"

namespace lacuna::io {

namespace {

constexpr int64_t kRows = 16;  // that a worker takes at once

void check_two_of_four(const FileTensor& bitmask, std::span<const uint8_t> keep, int64_t n) {
  for (size_t k = 0; k < keep.size(); k += 4)
    if (const int64_t kept = std::ranges::count(keep.subspan(k, std::min<size_t>(4, keep.size() - k)), uint8_t{1});
        kept != 2)
      throw Error("{}: row {} keeps {} of the four weights at input {}, but 2 are to be kept of every 4",
                  bitmask.where(), n, kept, k);
}

}  // namespace

Bitmask read_bitmask(const ModuleTensors& module) {
  const FileTensor &bitmask = module.need("bitmask"), &compressed = module.need("compressed");
  const FileTensor &shape = module.need("shape"), *row_offsets = module.find("row_offsets");
  const auto [N, K] = read_shape(shape);
  const int64_t stride = K / 8 + (K % 8 != 0 ? 1 : 0);
  if (bitmask.entry.dtype != "U8") throw Error("{}: U8 is expected, found {}", bitmask.where(), bitmask.entry.dtype);
  need_shape(bitmask, std::array{N, stride}, "a bit for each weight");

  Bitmask out{{N, K}, std::vector<uint8_t>(size_t(N * K)), {0}};
  for (int64_t n = 0; n < N; ++n) {
    const auto row = bitmask.entry.bytes.subspan(size_t(n * stride), size_t(stride));
    int64_t kept = 0;
    for (int64_t k = 0; k < K; ++k)
      kept += out.keep[size_t(n * K + k)] = uint8_t(uint8_t(row[size_t(k / 8)]) >> (k % 8) & 1);
    if (K % 8 != 0 && uint8_t(row.back()) >> (K % 8) != 0)
      throw Error("{}: row {} keeps inputs beyond its {}; the file is damaged", bitmask.where(), n, K);
    if (row_offsets == nullptr) check_two_of_four(bitmask, std::span(out.keep).subspan(size_t(n * K), size_t(K)), n);
    out.start.push_back(out.start.back() + kept);
  }
  if (row_offsets != nullptr) {
    const std::vector<int64_t> offsets = read_integers(*row_offsets);
    if (!std::ranges::equal(offsets, std::span(out.start).first(size_t(N))))
      throw Error("{}: the rows' first values do not follow from the mask; the file is damaged", row_offsets->where());
    need_shape(compressed, std::array{out.start.back()}, "the weights that the mask keeps");
  } else {
    need_shape(compressed, std::array{N, out.start.back() / N}, "two weights of every four");
  }
  return out;
}

ImportedMatrix import_values(const FileTensor& compressed, const Bitmask& mask, ThreadPool* pool) {
  const SafetensorsEntry& entry = compressed.entry;
  layout::Id own = layout::Id::f32;
  if (entry.dtype == "F16")
    own = layout::Id::f16;
  else if (entry.dtype == "BF16")
    own = layout::Id::bf16;
  else if (entry.dtype != "F32")
    throw Error("{}: values of dtype {} under a mask are not read; known are F16, BF16, F32, I8", compressed.where(),
                entry.dtype);
  const layout::Layout& rows = layout::get(own);
  const int64_t N = mask.shape.N, K = mask.shape.K;
  const auto size = size_t(rows.block_bytes);

  // All weights as rows of their own type.
  std::vector<std::byte> bytes(size_t(rows.size_bytes(mask.shape)));
  std::vector<float> w(size_t(N * K));
  std::vector<uint8_t> exact(size_t(N), 1);
  for_pieces(pool, N, kRows, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const std::byte* value = entry.bytes.data() + size_t(mask.start[size_t(n)]) * size;
      for (size_t i = size_t(n * K); i < size_t((n + 1) * K); ++i) {
        if (mask.keep[i] == 0) continue;
        std::memcpy(&bytes[i * size], value, size);
        value += size;
      }
      const auto row = std::span(w).subspan(size_t(n * K), size_t(K));
      rows.decode_row(rows, std::span(bytes).subspan(size_t(n * K) * size, size_t(K) * size), row);
      if (layout::find_non_finite(row) >= 0)
        throw Error("{}: a weight of row {} is not finite; the file is damaged", compressed.where(), n);
      for (const float x : row) exact[size_t(n)] &= uint8_t(to_float(to_f16(x)) == x);
    }
  });
  if (std::ranges::find(exact, 0) != exact.end()) return {&rows, mask.shape, {}, std::move(bytes)};
  ImportedMatrix out{&layout::get(layout::Id::bm16), mask.shape, {}, {}};
  out.params = naming_file(compressed.where(), [&] {
    return layout::pack_values(*out.layout, mask.shape, {}, w, mask.keep, out.bytes, pool);
  });
  return out;
}

}  // namespace lacuna::io
