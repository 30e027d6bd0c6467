// src/kernels/cpu/group_sparse.h - the prepared form of gs2, gs3, gs4 and gs8: rows one after the other, each one
// stream from its mask to its last code. K % 32 == 0.
//
// u64[N + 1]: where each row begins and the last ends, from the beginning; then rows, each at a multiple of 16 bytes:
//   masks   u32[ceil(G / 32)]  which of the row's G groups are kept; m are
//   zeros   m of 4 bits, low ones first, up to an even number of bytes; gs8: u8[m], likewise
//   scales  f16[m], up to a multiple of 16 bytes
//   codes   of the kept groups in units of at most 32 inputs (group 64: two units), chunk by chunk: byte i of a chunk
//           holds code i of each of its units, low bits first. A chunk has 2 units of 4 bits, 4 of 2, 1 of 8. 3 bits: 8
//           units in three lines: the low 2 bits of units 0..3, of 4..7, the high bits
// Kernels read a little past a row; after the last one there are kGroupSparseSlack bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu {

/// X(id, bits, group) for every size that has kernels.
#define LACUNA_GROUP_SIZES(X, id, bits) X(id, bits, 8) X(id, bits, 16) X(id, bits, 32) X(id, bits, 64) X(id, bits, 128)
#define LACUNA_EACH_GROUP_SPARSE(X) \
  LACUNA_GROUP_SIZES(X, gs2, 2)     \
  LACUNA_GROUP_SIZES(X, gs3, 3)     \
  LACUNA_GROUP_SIZES(X, gs4, 4)     \
  LACUNA_GROUP_SIZES(X, gs8, 8)

inline constexpr int64_t kGroupSparseSlack = 512;
/// Most inputs of a row: kernels keep places of groups in 16 bits.
inline constexpr int64_t kGroupSparseCols = int64_t{1} << 17;

/// Places of what belongs to a row; always inlined, since used under the flags of every instruction set.
template <int kBits, int64_t kGroup>
struct GroupSparseForm {
  static constexpr int64_t kUnit = kGroup < 32 ? kGroup : 32;    // inputs
  static constexpr int64_t kUnits = kGroup / kUnit;              // of a group
  static constexpr int64_t kChunk = kBits == 3 ? 8 : 8 / kBits;  // units
  static constexpr int64_t kChunkBytes = kBits == 3 ? 3 * kUnit : kUnit;

  __attribute__((always_inline)) static constexpr int64_t groups(int64_t K) { return (K + kGroup - 1) / kGroup; }
  __attribute__((always_inline)) static constexpr int64_t zeros_at(int64_t K) { return (groups(K) + 31) / 32 * 4; }
  __attribute__((always_inline)) static constexpr int64_t scales_at(int64_t K, int64_t kept) {
    return zeros_at(K) + (kBits == 8 ? (kept + 1) / 2 : (kept + 3) / 4) * 2;
  }
  __attribute__((always_inline)) static constexpr int64_t codes_at(int64_t K, int64_t kept) {
    return (scales_at(K, kept) + 2 * kept + 15) / 16 * 16;
  }
  __attribute__((always_inline)) static constexpr int64_t row_bytes(int64_t K, int64_t kept) {
    return (codes_at(K, kept) + (kept * kUnits + kChunk - 1) / kChunk * kChunkBytes + 15) / 16 * 16;
  }
  __attribute__((always_inline)) static constexpr int64_t rows_at(int64_t N) { return (8 * (N + 1) + 63) / 64 * 64; }
};

/// Where things lie in the canonical bytes of gs16; row_start comes first.
struct GroupValues {
  const std::byte *mask, *values;
  int64_t group, mask_row;
};
GroupValues group_values(const kernels::WeightView& view);

/// Whether the kernels take the shape.
bool fits_group_sparse(const Problem& problem);
/// LinearKernel::work_before: kept groups of the rows before `row`, and two for each row itself; in eighths of one.
int64_t group_sparse_work(const Problem& problem, int64_t row);

template <int kBits, int64_t kGroup>
int64_t group_sparse_prepared_bytes(const Problem& problem);
/// Writes where rows begin; before prepare_group_sparse.
template <int kBits, int64_t kGroup>
void place_group_sparse(const Problem& problem, std::byte* prepared);
template <int kBits, int64_t kGroup>
void prepare_group_sparse(const Problem& problem, int64_t row0, int64_t row1, std::byte* prepared);

}  // namespace lacuna::cpu
