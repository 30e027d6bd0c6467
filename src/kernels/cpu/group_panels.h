// src/kernels/cpu/group_panels.h - the prepared form of gs2, gs3, gs4 and gs8 for AVX-512 with VNNI and VBMI2: panels
// of 128 rows, in which the groups at one place of the rows lie together. K % 32 == 0.
//
// u64[panels]: where each panel begins, from the beginning; then panels, each at a multiple of 64 bytes:
//   masks   128 bits for each of the places 0..G-1: row r keeps its group there
//   places  0..G-1 in turn, of each its c kept groups in order of the rows:
//           scales  f16[c]
//           zeros   c of 4 bits, low ones first, up to a whole byte; gs8: u8[c]
//           codes   for each 16 groups kLines lines, a dword for each group: its byte i holds the codes of the group's
//                   inputs i, 4 + i, 8 + i, ... that belong to the line, kWidth bits each, low ones first. Lines of the
//                   last c % 16 groups have as many dwords
// Nothing is filled up, so that a place begins at any byte: memory is what one token waits for, and a load across two
// lines of a cache costs less than the eighth that whole sixteens would add at half of the groups. Kernels read up to
// kGroupPanelSlack bytes past the last place.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/group_sparse.h"
#include "kernels/cpu/linear_kernel.h"

namespace lacuna::cpu {

inline constexpr int64_t kGroupPanelRows = 128;
inline constexpr int64_t kGroupPanelMask = kGroupPanelRows / 8;  // bytes of a place
inline constexpr int64_t kGroupPanelSlack = 128;

template <int kBits, int64_t kSize>
struct GroupPanelForm {
  static constexpr int64_t kGroup = kSize;
  static constexpr int kZeroBits = kBits == 8 ? 8 : 4;
  /// Bits that a code takes here: 3 bits take 4, so that they are found with one shift, and a line is used whole.
  static constexpr int kWidth = kBits == 3 || (kBits == 2 && kSize == 8) ? 4 : kBits;
  static constexpr int64_t kLines = kGroup * kWidth / 32;
  __attribute__((always_inline)) static constexpr int64_t groups(int64_t K) { return (K + kGroup - 1) / kGroup; }
  /// Where zeros and codes of a place with `kept` groups begin, and where it ends.
  __attribute__((always_inline)) static constexpr int64_t zeros_at(int64_t kept) { return 2 * kept; }
  __attribute__((always_inline)) static constexpr int64_t codes_at(int64_t kept) {
    return 2 * kept + (kept * kZeroBits + 7) / 8;
  }
  __attribute__((always_inline)) static constexpr int64_t place_bytes(int64_t kept) {
    return codes_at(kept) + 4 * kLines * kept;
  }
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
