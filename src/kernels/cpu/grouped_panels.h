// src/kernels/cpu/grouped_panels.h - the prepared forms of the gq, bm and nm24_q4 layouts: panels of 16 rows, one per
// int32 lane, K % 32 == 0, groups of a multiple of 32 inputs. Rows past N are zero.
//
// Dense (gq): panels of dense_panel_bytes each:
//   codes   [K/32][64 * bits]  planes of bits, as linear_panels.cc has them
//   scales  [G][64]            f16 scale of the 16 rows, f16 zero of the 16 rows
//
// Masked (bm2..8, nm24_q4): u64[panels + 1], where each panel begins and the last ends, then panels without gaps, which
// a kernel reads from one end to the other:
//   starts  u32[steps + 1]  where each step of 256 inputs begins in the panel, in lines of 64 bytes
//   most    u32             chunks of a quarter of the step that has most, rounded up; zeros up to a line
//   scales  [G][64]         f16 scale of the 16 rows, u8 zero of the 16 rows, 16 bytes of nothing
//   then for each step
//     masks [8 or less][8] u64  vector j of a block of 32 inputs: bit 4 r + i says whether row r keeps input 4 j + i
//     codes of the kept weights in order of the masks' bits, in chunks: byte i = 0..63 of a chunk holds codes i, 64 +
//     i,
//           128 + i ... , low bits first. 3 bits: a chunk is two such lines of the codes' low 2 bits (codes 0..255,
//           256..511), then a line of the high bits.
// A kernel unpacks the codes of a step to bytes, then an expansion by a mask gives each code its place. Dropped weights
// get the row's zero as code, so that they add the same to sum(code * x) as to zero * sum(x), and nothing in the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu {

inline constexpr int64_t kStepCols = 256;
inline constexpr int64_t kGroupBytes = 64;  // scales of one group of a panel
inline constexpr int64_t kQuarters = 4;     // a kernel unpacks a step's codes a quarter at a time

/// Codes of a chunk.
__attribute__((always_inline)) constexpr int64_t chunk_codes(int bits) { return bits == 3 ? 512 : 64 * 8 / bits; }
__attribute__((always_inline)) constexpr int64_t chunk_bytes(int bits) { return chunk_codes(bits) * bits / 8; }
__attribute__((always_inline)) constexpr int64_t count_groups(int64_t K, int64_t group) {
  return (K + group - 1) / group;
}
__attribute__((always_inline)) constexpr int64_t dense_panel_bytes(int bits, int64_t K, int64_t group) {
  return odd_lines(K / kBlock * 64 * bits + count_groups(K, group) * kGroupBytes);
}
__attribute__((always_inline)) constexpr int64_t count_steps(int64_t K) { return (K + kStepCols - 1) / kStepCols; }
/// Of a masked panel, from its beginning: where scales begin, and the first step.
__attribute__((always_inline)) constexpr int64_t scales_at(int64_t K) { return (count_steps(K) + 17) / 16 * 64; }
__attribute__((always_inline)) constexpr int64_t steps_at(int64_t K, int64_t group) {
  return scales_at(K) + count_groups(K, group) * kGroupBytes;
}

/// Whether the shape and parameters fit, and, of masked panels, every zero is one of the codes.
bool fits_dense_panels(const Problem& problem);
bool fits_masked_panels(const Problem& problem);

int64_t dense_prepared_bytes(const Problem& problem);
void prepare_dense(const Problem& problem, int64_t row0, int64_t row1, std::byte* prepared);
int64_t masked_prepared_bytes(const Problem& problem);
/// A kernel unpacks as many chunks of each step as the largest has, and reads so far past the end.
__attribute__((always_inline)) constexpr int64_t most_chunks(int bits) {
  const int64_t chunks = kPanelRows * kStepCols / chunk_codes(bits);
  return (chunks + kQuarters - 1) / kQuarters * kQuarters;
}
/// Writes where panels begin; before prepare_masked.
void place_masked(const Problem& problem, std::byte* prepared);
void prepare_masked(const Problem& problem, int64_t row0, int64_t row1, std::byte* prepared);

}  // namespace lacuna::cpu
