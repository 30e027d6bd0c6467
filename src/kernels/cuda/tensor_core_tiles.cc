// src/kernels/cuda/tensor_core_tiles.cc - canonical bytes into the blocks of tensor_core.h and back.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "core/error.h"
#include "kernels/cuda/tensor_core.h"
#include "layout/tensor_core.h"

namespace lacuna::cuda {

namespace {

constexpr int64_t kRows = kTileRowsOfWeights, kPiece = 16;
constexpr std::byte kFirstTwo{0x44};  // of two groups of four each, the places 0 and 1

/// Sizes of blocks, in bytes but for `columns`. Metadata keeps the order of the canonical index in words of 32 columns
/// of a row (e4m3) and in halves of words of 16 columns (bf16), both `unit` bytes.
struct BlockMap {
  bool sparse;
  int64_t columns;    // inputs of a block
  int64_t row;        // values of a row of a block
  int64_t row_index;  // metadata of a row of a block
  int64_t unit;
  int64_t bytes;

  explicit BlockMap(Operation operation)
      : sparse(operation.sparse),
        columns(operation.eight_bits ? kTileInputBytes : kTileInputBytes / 2),
        row(sparse ? kTileInputBytes / 2 : kTileInputBytes),
        row_index(sparse ? columns / 8 : 0),
        unit(operation.eight_bits ? 4 : 2),
        bytes(kRows * (row + row_index)) {}

  int64_t blocks(int64_t K) const { return (K + columns - 1) / columns; }
  /// Piece p of 16 bytes of the values of row r.
  int64_t piece(int64_t r, int64_t p) const { return r * row + kPiece * (p ^ (sparse ? r / 2 % 4 : r % 8)); }
  /// Unit u of the metadata of row r.
  int64_t metadata(int64_t r, int64_t u) const {
    const int64_t sixteen = kRows * row + r / 16 * 16 * row_index, lane = 4 * (r % 8), half = r / 8 % 2;
    if (unit == 4) return sixteen + 4 * (2 * (lane + 2 * (u % 2) + half) + u / 2);
    return sixteen + 4 * (lane + u) + 2 * half;
  }
};

/// A row without gaps, padded to whole blocks.
struct PaddedRow {
  std::vector<std::byte> values, index;

  PaddedRow(const BlockMap& map, int64_t blocks)
      : values(size_t(blocks * map.row)), index(size_t(blocks * map.row_index)) {}
  void clear() {
    std::ranges::fill(values, std::byte{0});
    std::ranges::fill(index, kFirstTwo);
  }
};

/// copy(in a row of blocks, in the padded row, bytes) for all values, then for all metadata, of row r of the blocks.
template <class Values, class Index>
void each_piece(const BlockMap& map, int64_t blocks, int64_t r, const Values& values, const Index& index) {
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t p = 0; p < map.row / kPiece; ++p) values(b * map.bytes + map.piece(r, p), b * map.row + p * kPiece);
    for (int64_t u = 0; u < map.row_index / map.unit; ++u)
      index(b * map.bytes + map.metadata(r, u), b * map.row_index + u * map.unit);
  }
}

/// Where things lie in a canonical row; bf16 is the row layout of that name.
layout::TensorCoreRow canonical_row(const layout::Layout& layout, int64_t K) {
  if (layout.family == layout::Family::tensor_core) return layout::tensor_core_row(layout, K);
  layout::TensorCoreRow out;
  out.kept = K;
  out.bytes = layout.row_bytes(K);
  return out;
}

layout::Id id_of(Operation operation) {
  if (operation.eight_bits) return operation.sparse ? layout::Id::nm24_f8 : layout::Id::f8;
  return operation.sparse ? layout::Id::nm24_bf16 : layout::Id::bf16;
}

int64_t row_groups(int64_t N) { return (N + kRows - 1) / kRows; }

}  // namespace

Operation operation_of(const layout::Layout& layout) {
  switch (layout.id) {
    case layout::Id::f8:
      return {.eight_bits = true, .sparse = false};
    case layout::Id::nm24_f8:
      return {.eight_bits = true, .sparse = true};
    case layout::Id::nm24_bf16:
      return {.eight_bits = false, .sparse = true};
    case layout::Id::bf16:
      return {.eight_bits = false, .sparse = false};
    default:
      throw Error("{} has no form for FP8 and 2:4 tensor cores; f8, nm24_f8, nm24_bf16 and bf16 have", layout.name);
  }
}

int64_t block_bytes(Operation operation) { return BlockMap(operation).bytes; }

int64_t tile_bytes(Operation operation, layout::Shape shape) {
  const BlockMap map(operation);
  return row_groups(shape.N) * map.blocks(shape.K) * map.bytes;
}

TensorCoreTiles make_tensor_core_tiles(const layout::Layout& layout, layout::Shape shape,
                                       std::span<const std::byte> bytes, ThreadPool* pool) {
  assert(int64_t(bytes.size()) == layout.size_bytes(shape));
  TensorCoreTiles out{operation_of(layout), shape, {}, {}};
  const layout::TensorCoreRow from = canonical_row(layout, shape.K);
  const BlockMap map(out.operation);
  const int64_t blocks = map.blocks(shape.K);
  out.blocks.resize(size_t(tile_bytes(out.operation, shape)));
  if (from.scaled) out.scale.assign(size_t(row_groups(shape.N) * kRows), 1.0f);
  const auto fill = [&](int64_t begin, int64_t end) {
    PaddedRow padded(map, blocks);
    for (int64_t n = begin * kRows; n < end * kRows; ++n) {
      padded.clear();
      if (n < shape.N) {
        const std::byte* const row = bytes.data() + n * from.bytes;
        if (from.scaled) std::memcpy(&out.scale[size_t(n)], row, sizeof(float));
        std::copy(row + from.values, row + from.bytes, padded.values.begin());
        if (map.sparse) std::copy(row + from.index, row + from.values, padded.index.begin());
        if (map.sparse && from.groups % 2 != 0) padded.index[size_t(from.groups / 2)] |= kFirstTwo & std::byte{0xf0};
      }
      std::byte* const to = out.blocks.data() + n / kRows * blocks * map.bytes;
      each_piece(
          map, blocks, n % kRows,
          [&](int64_t at, int64_t i) { std::memcpy(to + at, padded.values.data() + i, kPiece); },
          [&](int64_t at, int64_t i) { std::memcpy(to + at, padded.index.data() + i, size_t(map.unit)); });
    }
  };
  if (pool == nullptr)
    fill(0, row_groups(shape.N));
  else
    pool->parallel_for(row_groups(shape.N), 1, fill);
  return out;
}

std::vector<std::byte> canonical_bytes(const TensorCoreTiles& tiles) {
  const layout::Layout& layout = layout::get(id_of(tiles.operation));
  const layout::TensorCoreRow to = canonical_row(layout, tiles.shape.K);
  const BlockMap map(tiles.operation);
  const int64_t blocks = map.blocks(tiles.shape.K);
  std::vector<std::byte> out(size_t(layout.size_bytes(tiles.shape)));
  PaddedRow padded(map, blocks);
  for (int64_t n = 0; n < tiles.shape.N; ++n) {
    const std::byte* const from = tiles.blocks.data() + n / kRows * blocks * map.bytes;
    each_piece(
        map, blocks, n % kRows,
        [&](int64_t at, int64_t i) { std::memcpy(padded.values.data() + i, from + at, kPiece); },
        [&](int64_t at, int64_t i) { std::memcpy(padded.index.data() + i, from + at, size_t(map.unit)); });
    std::byte* const row = out.data() + n * to.bytes;
    if (to.scaled) std::memcpy(row, &tiles.scale[size_t(n)], sizeof(float));
    std::copy_n(padded.values.begin(), to.bytes - to.values, row + to.values);
    if (!map.sparse) continue;
    std::copy_n(padded.index.begin(), to.values - to.index, row + to.index);
    if (to.groups % 2 != 0) row[to.index + to.groups / 2] &= std::byte{0x0f};
  }
  return out;
}

}  // namespace lacuna::cuda
