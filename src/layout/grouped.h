// src/layout/grouped.h - what the layouts whose inputs share scale and zero in groups along a row have in common: the
// gq (layout/gq.h), bm (layout/bm.h), gs (layout/gs.h) and nm24_q4 (layout/nm24_q4.h) layouts, and how codes that a
// solver chose get into them. Nothing is rounded on the way: what does not fit exactly is an Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "layout/layout.h"

namespace lacuna::layout {

/// Inputs of a full group: group_size, or K where that is 0 or larger than K.
constexpr int64_t whole_group(int64_t K, int64_t group_size) {
  return group_size <= 0 || group_size > K ? K : group_size;
}
constexpr int64_t group_count(int64_t K, int64_t group_size) {
  const int64_t g = whole_group(K, group_size);
  return g == 0 ? 0 : K / g + (K % g != 0 ? 1 : 0);
}

/// What a solver returns: weight = scale * (code - zero), a dropped weight is 0 and its code does not count.
struct GroupedCodes {
  std::span<const uint8_t> code;       // [N, K], below 2^bits where kept
  std::span<const float> scale, zero;  // [N, G] finite values that f16 holds exactly
  std::span<const uint8_t> keep = {};  // [N, K], 0: dropped; empty: all are kept
};

/// Encodes a matrix into `out` (its size becomes the matrix's). params.group_size says what G is; octets, kept_groups
/// and nnz, where the layout has them, are found from `keep`. Returns the params that go into the manifest. Rows are
/// shared out over the pool's workers where there is one. Throws Error naming row and input for a code, scale or zero
/// that does not fit, and for what the layout cannot hold:
///   gq       a dropped weight needs a zero that is one of the codes, which it then gets
///   bm2..8   anything goes
///   gs2..8   a group keeps all of its weights or none; zeros of kept groups are codes
///   nm24_q4  every group of four keeps two, zeros are 8, group_size is 64
/// bm16 and gs16 hold values: pack_values.
Params pack_grouped(const Layout& layout, Shape shape, Params params, const GroupedCodes& codes,
                    std::vector<std::byte>& out, ThreadPool* pool = nullptr);

/// The same for bm16 and gs16 (whose params have a group_size): w: [N, K], rounded to f16, to nearest even. keep:
/// [N, K] or empty. Throws Error for a kept value that is not finite or beyond f16's range.
Params pack_values(const Layout& layout, Shape shape, Params params, std::span<const float> w,
                   std::span<const uint8_t> keep, std::vector<std::byte>& out, ThreadPool* pool = nullptr);

/// `params` with the octets, kept_groups and nnz of a matrix with this mask, in the layouts that have them: what a
/// file's header needs to know before anything is encoded. keep: [N, K] or empty.
Params complete_params(const Layout& layout, Shape shape, Params params, std::span<const uint8_t> keep);

/// The same matrix with its rows in another order: row n of `out` is row order[n] of `bytes`. Nothing is decoded;
/// params stay as they are. bytes: sound (Layout::first_bad); order: [N], each row once; out: as large as bytes.
void permute_rows(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                  std::span<const int64_t> order, std::span<std::byte> out);

/// Rounds a row to nearest: for each group the grid of 2^bits values from its least to its largest kept weight (0
/// always among them), scale rounded to f16, zero an integer. code: [K], scale, zero: [G]. keep: [K] or empty. Groups
/// without a weight other than 0 get scale 0. Scales beyond f16's range saturate.
void round_to_grid(int bits, int64_t group_size, std::span<const float> w, std::span<const uint8_t> keep,
                   std::span<uint8_t> code, std::span<float> scale, std::span<float> zero);

/// Whether every f16 in `bytes` is finite.
bool finite_halves(std::span<const std::byte> bytes);

}  // namespace lacuna::layout
