// src/kernels/cpu/grouped_panels.h - the prepared forms of the gq, bm and nm24_q4 layouts: panels of 16 rows, one per
// int32 lane, K % 32 == 0, groups of a multiple of 32 inputs. Rows past N are zero.
//
// Dense (gq): panels of dense_panel_bytes each:
//   codes   [K/32][64 * bits]  planes of bits, as linear_panels.cc has them
//   scales  [G][64]            f16 scale of the 16 rows, f16 zero of the 16 rows
//
// Masked (bm2..8, nm24_q4): u64[panels], where each panel begins, then panels:
//   scales  [G][64]            f16 scale of the 16 rows, u8 zero of the 16 rows, 16 bytes of nothing
//   masks   [K/32][8] u64      vector j of a block of 32 inputs: bit 4 r + i says whether row r keeps input 4 j + i
//   starts  u32[steps + 1]     codes before each step of 256 inputs, then nothing up to a multiple of 64 bytes
//   codes   of the kept weights in order of the masks' bits, in chunks: byte i = 0..63 of a chunk holds codes i,
//           64 + i, 128 + i ... , low bits first. 8 bits: the codes as they are; 3 bits: a chunk is two such lines of
//           the codes' low 2 bits (codes 0..255, 256..511), then a line of the high bits.
// A kernel unpacks the codes of a step to bytes, then an expansion by a mask gives each code its place. Dropped weights
// get the row's zero as code, so that they add the same to sum(code * x) as to zero * sum(x), and nothing in the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu {

inline constexpr int64_t kStepCols = 256;
inline constexpr int64_t kGroupBytes = 64;  // scales of one group of a panel

/// Codes of a chunk; 8 bits: those that one line holds.
__attribute__((always_inline)) constexpr int64_t chunk_codes(int bits) { return bits == 3 ? 512 : 64 * 8 / bits; }
__attribute__((always_inline)) constexpr int64_t chunk_bytes(int bits) { return chunk_codes(bits) * bits / 8; }
__attribute__((always_inline)) constexpr int64_t count_groups(int64_t K, int64_t group) {
  return (K + group - 1) / group;
}
__attribute__((always_inline)) constexpr int64_t dense_panel_bytes(int bits, int64_t K, int64_t group) {
  return odd_lines(K / kBlock * 64 * bits + count_groups(K, group) * kGroupBytes);
}
/// Of a masked panel, from its beginning.
__attribute__((always_inline)) constexpr int64_t masks_at(int64_t K, int64_t group) {
  return count_groups(K, group) * kGroupBytes;
}
__attribute__((always_inline)) constexpr int64_t starts_at(int64_t K, int64_t group) {
  return masks_at(K, group) + K / kBlock * 64;
}
__attribute__((always_inline)) constexpr int64_t codes_at(int64_t K, int64_t group) {
  return starts_at(K, group) + ((K + kStepCols - 1) / kStepCols + 16) / 16 * 64;
}

/// Whether the shape and parameters fit, and, of masked panels, every zero is one of the codes.
bool fits_dense_panels(const Problem& problem);
bool fits_masked_panels(const Problem& problem);

int64_t dense_prepared_bytes(const Problem& problem);
void prepare_dense(const Problem& problem, int64_t row0, int64_t row1, std::byte* prepared);
int64_t masked_prepared_bytes(const Problem& problem);
void prepare_masked(const Problem& problem, int64_t row0, int64_t row1, std::byte* prepared);

}  // namespace lacuna::cpu
