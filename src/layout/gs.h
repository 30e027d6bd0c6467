// src/layout/gs.h - gs2, gs3, gs4, gs8, gs16: group-sparse rows (GQSA, arXiv:2412.17560, section 3.2). Groups of inputs
// along a row are kept or dropped whole, one bit for each; a kept one has codes, a scale and an integer zero. Rows may
// keep any number of groups, none and all included; dropped weights are exactly +0.
// W: [N, K], any N >= 1 and K >= 1. Codes have B bits, B as in the name. Parameters:
//   group_size g  8, 16, 32, 64 or 128: inputs of a row that are kept together and share scale and zero.
//                 G = ceil(K / g) groups; the last may be shorter, and is stored with codes 0 up to g
//   kept_groups   of the whole matrix; below 2^32
// and nnz, the weights in kept groups (at most K of a row), from the manifest. Sections, each beginning at the next
// multiple of 32 bytes, the gaps filled with zeros:
//   row_start u32[N + 1]        row n's kept groups are row_start[n] .. row_start[n + 1] of the following sections, in
//                               order of the inputs; row_start[0] = 0. Any even share of them begins in a row that a
//                               bisection finds
//   mask      u8[N, ceil(G/8)]  bit i % 8 of byte i / 8: group i is kept; bits past G are zero
//   scale     f16[kept_groups]  weight = scale * (code - zero), the difference and the product in float
//   zero      kept_groups codes of B bits as a string of bits, low bits first (layout/octet.h), over all rows
//                               (gs16 has neither scale nor zero)
//   code      [kept_groups] of g B / 8 bytes: the group's codes as a string of bits. gs16: the weights as f16
// 1 / g + (B + (16 + B) / g) (1 - sparsity) bits a weight and 4 bytes a row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "layout/grouped.h"
#include "layout/layout.h"

namespace lacuna::layout {

/// Whether a group may have so many inputs.
constexpr bool is_sparse_group(int64_t group_size) {
  return group_size == 8 || group_size == 16 || group_size == 32 || group_size == 64 || group_size == 128;
}

/// Places of the sections in bytes from the beginning.
struct GroupSparseMap {
  int bits = 0;
  int64_t group = 0;        // inputs of a group
  int64_t groups = 0;       // of a row, kept or not
  int64_t mask_row = 0;     // bytes of a row's mask
  int64_t group_bytes = 0;  // of a kept group's codes
  int64_t mask = 0, scale = 0, zero = 0, code = 0, end = 0;

  /// Throws Error for a shape or params that cannot be, and where sizes pass 2^63.
  GroupSparseMap(const Layout& layout, Shape shape, Params params);
  /// Inputs of group i.
  int64_t width(int64_t K, int64_t i) const { return i + 1 < groups ? group : K - i * group; }
};

/// A row's kept groups. Throws Error naming the row unless they lie in the matrix and are as many as its mask says.
struct GroupSparseRow {
  const std::byte* mask;  // [mask_row]
  int64_t first, kept;    // groups
};
GroupSparseRow group_sparse_row(const GroupSparseMap& map, Shape shape, Params params, std::span<const std::byte> bytes,
                                int64_t n);
inline bool is_kept_group(const std::byte* mask, int64_t i) { return (uint8_t(mask[i / 8]) >> (i % 8) & 1) != 0; }

/// pack_grouped and pack_values (layout/grouped.h) of the gs layouts. params: complete; out: zeros.
void pack_group_sparse(const Layout& layout, Shape shape, Params params, const GroupedCodes& codes,
                       std::span<std::byte> out, ThreadPool* pool);
void pack_group_sparse_values(const Layout& layout, Shape shape, Params params, std::span<const float> w,
                              std::span<const uint8_t> keep, std::span<std::byte> out, ThreadPool* pool);
/// kept_groups and nnz of a mask [N, K] (empty: all are kept). A group counts as kept with its first kept weight.
Params count_kept_groups(Shape shape, Params params, std::span<const uint8_t> keep);
/// permute_rows of the gs layouts.
void permute_group_sparse_rows(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                               std::span<const int64_t> order, std::span<std::byte> out);

/// Layout::size, ::decode and ::first_bad of the gs layouts. decode_group_sparse defines them; it throws Error where
/// group_sparse_row does, so that no bytes can lead it outside of `bytes`.
int64_t group_sparse_size(const Layout& layout, Shape shape, Params params);
void decode_group_sparse(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                         int64_t row0, int64_t rows, float* out);
int64_t first_bad_group_sparse_row(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes);

}  // namespace lacuna::layout
