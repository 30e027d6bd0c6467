// src/layout/zigzag.h - zigzag layouts: blocks that run along the outputs, so that an input that is not active lets a
// whole column go unread (SpQt, section 4.1.2).
// W: [N, K], any N >= 1 and K >= 1. 256 consecutive outputs of one column are a superblock, whose bytes are those of a
// K-quant block (zz8: of eight q8_0 blocks) with outputs in the place of inputs:
//   zz2_k q2_K (84 bytes), zz3_k q3_K (110), zz4_k q4_K (144), zz5_k q5_K (176), zz6_k q6_K (210), zz8 8 x q8_0 (272)
// Outputs from N up to the next multiple of 256 are encoded as zeros and mean nothing. Superblock rows (256 outputs
// each) are grouped into tiles of tile_rows / 256 of them, the last tile holds the rest; a tile is stored column after
// column, each column's superblocks in order of the outputs:
//   [tiles][K][superblock rows of the tile] superblocks
// tile_rows = 256 is the paper's layout; 0 or anything from N up means whole columns, one tile.
#pragma once

#include <cstdint>
#include <span>

#include "layout/layout.h"

namespace lacuna::layout {

inline constexpr int64_t kSuperRows = 256;  // outputs of a superblock

/// Superblock rows of a matrix: ceil(N / 256).
constexpr int64_t super_rows(int64_t N) { return N / kSuperRows + (N % kSuperRows != 0 ? 1 : 0); }

/// Where superblocks lie. All counts are in superblocks.
struct ZigzagMap {
  int64_t rows = 0;  // superblock rows of the matrix
  int64_t tile = 0;  // superblock rows of a full tile
  int64_t K = 0;

  ZigzagMap(Shape shape, Params params)
      : rows(super_rows(shape.N)),
        tile(params.tile_rows <= 0 || params.tile_rows / kSuperRows >= rows ? rows : params.tile_rows / kSuperRows),
        K(shape.K) {}
  int64_t tiles() const { return rows == 0 ? 0 : (rows + tile - 1) / tile; }
  int64_t tile_height(int64_t t) const { return (t + 1) * tile <= rows ? tile : rows - t * tile; }
  /// Index of superblock row r of column k.
  int64_t index(int64_t r, int64_t k) const {
    const int64_t t = r / tile;
    return t * tile * K + k * tile_height(t) + (r - t * tile);
  }
};

/// Throws Error unless tile_rows is 0 or a positive multiple of 256.
void check_zigzag_params(Params params);

/// Encodes superblock row r from outputs [256 r, 256 r + rows): w: [rows, K], rows = min(256, N - 256 r). importance:
/// [K] or empty, as for a row; it weighs inputs, of which a superblock has one, so it changes nothing. out: the whole
/// matrix. Rows may be encoded in any order, also at the same time.
void encode_zigzag(const Layout& layout, Shape shape, Params params, int64_t r, const float* w,
                   std::span<const float> importance, std::span<std::byte> out);

/// The same for the columns [k0, k0 + cols) only: w: [rows, cols].
void encode_zigzag_columns(const Layout& layout, Shape shape, Params params, int64_t r, int64_t k0, int64_t cols,
                           const float* w, std::span<std::byte> out);

/// Decodes outputs [row0, row0 + rows), any range, into out: [rows, K]. This function defines the layouts.
void decode_zigzag(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes, int64_t row0,
                   int64_t rows, float* out);

/// The same for the columns [k0, k0 + cols) only: out: [rows, cols].
void decode_zigzag_columns(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                           int64_t row0, int64_t rows, int64_t k0, int64_t cols, float* out);

/// Decodes one column's superblock row r: w: [256], zeros past N included.
void decode_zigzag_superblock(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                              int64_t r, int64_t k, float* w);

/// First output of the first superblock in `bytes` whose scales are not finite, or -1.
int64_t first_bad_zigzag_output(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes);

/// The same weights under other params: a permutation of superblocks.
void permute_zigzag(const Layout& layout, Shape shape, Params from, std::span<const std::byte> in, Params to,
                    std::span<std::byte> out);

}  // namespace lacuna::layout
