// src/kernels/cpu/group_panels.h - the prepared form of gs2, gs3, gs4 and gs8 for AVX-512 with VNNI and VBMI2: panels
// of 128 rows, in which the groups at one place of the rows lie together. K % 32 == 0.
//
// u64[panels][2]: where a panel's heads and its lines begin; then panels, each with the places 0..G-1 in turn:
//   heads  for a place: 128 bits, row r keeps its group here; then for each 16 kept groups, in order of the rows:
//          f16[16] scales, u8[16] zeros. The last 16 are filled up with zeros
//   lines  for the same 16 groups kLines lines of 64 bytes, a dword for each group: byte i holds the codes of the
//   inputs
//          i, 4 + i, 8 + i, ... of the group, kWidth bits each, low ones first
// Where kept groups are no multiple of 16 at a place, the rest of the 16 is computed for nothing: about 12% at half of
// the groups.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/group_sparse.h"
#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu {

inline constexpr int64_t kGroupPanelRows = 128;
inline constexpr int64_t kGroupPanelMasks = kGroupPanelRows / 8, kGroupPanelHead = 16 * 3;  // bytes

template <int kBits, int64_t kSize>
struct GroupPanelForm {
  static constexpr int64_t kGroup = kSize;
  /// Bits that a code takes here: 3 bits take 4, so that they are found with one shift, and a line is used whole.
  static constexpr int kWidth = kBits == 3 || (kBits == 2 && kSize == 8) ? 4 : kBits;
  static constexpr int64_t kLines = kGroup * kWidth / 32;
  __attribute__((always_inline)) static constexpr int64_t groups(int64_t K) { return (K + kGroup - 1) / kGroup; }
};

template <int kBits, int64_t kGroup>
int64_t group_panels_bytes(const Problem& problem);
/// Writes where panels begin; before prepare_group_panels.
template <int kBits, int64_t kGroup>
void place_group_panels(const Problem& problem, std::byte* prepared);
/// The panels that begin in [row0, row1).
template <int kBits, int64_t kGroup>
void prepare_group_panels(const Problem& problem, int64_t row0, int64_t row1, std::byte* prepared);

}  // namespace lacuna::cpu
