#include "layout/zigzag.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cstring>

#include "core/error.h"

namespace lacuna::layout {

namespace {

constexpr int64_t kStripCols = 16;  // a cache line of f32: what is transposed at once

/// Outputs of a strip of columns, column after column.
using Strip = std::array<std::array<float, size_t(kSuperRows)>, size_t(kStripCols)>;

size_t superblock_offset(const Layout& layout, const ZigzagMap& map, int64_t r, int64_t k) {
  return size_t(map.index(r, k) * layout.block_bytes);
}

}  // namespace

void check_zigzag_params(Params params) {
  if (params.tile_rows < 0 || params.tile_rows % kSuperRows != 0)
    throw Error("tile_rows is {}, but it must be 0 (whole columns) or a multiple of {}", params.tile_rows, kSuperRows);
}

void encode_zigzag(const Layout& layout, Shape shape, Params params, int64_t r, const float* w,
                   std::span<const float> importance, std::span<std::byte> out) {
  if (!importance.empty() && int64_t(importance.size()) != shape.K)
    throw Error("{} importances for {} inputs; give one for each input or none", importance.size(), shape.K);
  encode_zigzag_columns(layout, shape, params, r, 0, shape.K, w, out);
}

void encode_zigzag_columns(const Layout& layout, Shape shape, Params params, int64_t r, int64_t k0, int64_t cols,
                           const float* w, std::span<std::byte> out) {
  assert(layout.zigzag && k0 >= 0 && k0 + cols <= shape.K);
  assert(int64_t(out.size()) == layout.size_bytes(shape));
  const ZigzagMap map(shape, params);
  assert(r >= 0 && r < map.rows);
  const Layout& superblock = row_layout(layout);
  const int64_t rows = std::min(kSuperRows, shape.N - r * kSuperRows);
  Strip strip{};  // outputs from N on stay zeros
  for (int64_t k = 0; k < cols; k += kStripCols) {
    const int64_t width = std::min(kStripCols, cols - k);
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t c = 0; c < width; ++c) strip[size_t(c)][size_t(n)] = w[n * cols + k + c];
    for (int64_t c = 0; c < width; ++c)
      superblock.encode_row(superblock, strip[size_t(c)], {},
                            out.subspan(superblock_offset(layout, map, r, k0 + k + c), size_t(layout.block_bytes)));
  }
}

void decode_zigzag(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, int64_t row0,
                   int64_t rows, float* out) {
  decode_zigzag_columns(layout, shape, params, bytes, row0, rows, 0, shape.K, out);
}

void decode_zigzag_columns(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                           int64_t row0, int64_t rows, int64_t k0, int64_t cols, float* out) {
  assert(layout.zigzag && row0 >= 0 && rows >= 0 && row0 + rows <= shape.N && k0 >= 0 && k0 + cols <= shape.K);
  assert(int64_t(bytes.size()) == layout.size_bytes(shape));
  const ZigzagMap map(shape, params);
  const Layout& superblock = row_layout(layout);
  Strip strip;
  for (int64_t n = row0; n < row0 + rows;) {
    const int64_t r = n / kSuperRows, first = n % kSuperRows;
    const int64_t count = std::min(kSuperRows - first, row0 + rows - n);
    for (int64_t k = 0; k < cols; k += kStripCols) {
      const int64_t width = std::min(kStripCols, cols - k);
      for (int64_t c = 0; c < width; ++c)
        superblock.decode_row(superblock,
                              bytes.subspan(superblock_offset(layout, map, r, k0 + k + c), size_t(layout.block_bytes)),
                              strip[size_t(c)]);
      float* to = out + (n - row0) * cols + k;
      for (int64_t i = 0; i < count; ++i)
        for (int64_t c = 0; c < width; ++c) to[i * cols + c] = strip[size_t(c)][size_t(first + i)];
    }
    n += count;
  }
}

void decode_zigzag_superblock(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                              int64_t r, int64_t k, float* w) {
  const ZigzagMap map(shape, params);
  const Layout& superblock = row_layout(layout);
  superblock.decode_row(superblock, bytes.subspan(superblock_offset(layout, map, r, k), size_t(layout.block_bytes)),
                        {w, size_t(kSuperRows)});
  const int64_t rows = std::min(kSuperRows, shape.N - r * kSuperRows);
  std::fill(w + rows, w + kSuperRows, 0.0f);
}

int64_t first_bad_zigzag_output(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes) {
  const ZigzagMap map(shape, params);
  const Layout& superblock = row_layout(layout);
  const int64_t bad = first_bad_row(superblock, {map.rows * map.K, kSuperRows}, bytes);
  if (bad < 0) return -1;
  const int64_t t = bad / (map.tile * map.K);  // every tile but the last is full
  const int64_t r = t * map.tile + (bad - t * map.tile * map.K) % map.tile_height(t);
  return r * kSuperRows;
}

void permute_zigzag(const Layout& layout, Shape shape, Params from, std::span<const std::byte> in, Params to,
                    std::span<std::byte> out) {
  assert(int64_t(in.size()) == layout.size_bytes(shape) && in.size() == out.size());
  const ZigzagMap source(shape, from), target(shape, to);
  for (int64_t t = 0; t < target.tiles(); ++t)
    for (int64_t k = 0; k < target.K; ++k)
      for (int64_t r = t * target.tile; r < t * target.tile + target.tile_height(t); ++r)
        std::memcpy(out.data() + superblock_offset(layout, target, r, k),
                    in.data() + superblock_offset(layout, source, r, k), size_t(layout.block_bytes));
}

}  // namespace lacuna::layout
