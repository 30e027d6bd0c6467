// src/layout/bsr.h - block sparse rows as GQSA writes them down (arXiv:2412.17560, section 3.2): three arrays, whose
// blocks are groups of consecutive inputs of one row, and the kept groups' scales and zeros in the same order.
//   row_index  [N + 1]             groups row_index[n] .. row_index[n + 1] belong to row n; row_index[0] = 0
//   groups     [kept]              the place of each in its row, in groups; ascending within a row
//   values     [kept, group_size]  codes; those past the last input are 0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "layout/grouped.h"
#include "layout/layout.h"

namespace lacuna::layout {

struct Bsr {
  Shape shape;
  int64_t group_size = 0;  // any from 1 up
  std::vector<int64_t> row_index, groups;
  std::vector<uint8_t> values;
  std::vector<float> scale, zero;  // [kept]: weight = scale * (code - zero)
};

/// A solver's answer with a code for each weight: what GroupedCodes refers to.
struct DenseCodes {
  std::vector<uint8_t> code, keep;  // [N, K]; dropped weights have code and keep 0
  std::vector<float> scale, zero;   // [N, G]; of dropped groups 0
  GroupedCodes codes() const { return {code, scale, zero, keep}; }
};

/// Keeps the groups of which codes.keep keeps a weight. Throws Error where it keeps only a part of one, and for spans
/// of the wrong length.
Bsr to_bsr(Shape shape, int64_t group_size, const GroupedCodes& codes);
/// The inverse. Throws Error for arrays that contradict each other or the shape.
DenseCodes from_bsr(const Bsr& bsr);

/// Between the three arrays and the bytes of gs2, gs3, gs4 and gs8 (layout/gs.h). import_bsr throws Error as from_bsr
/// and pack_grouped do.
Params import_bsr(const Layout& layout, const Bsr& bsr, std::vector<std::byte>& out, ThreadPool* pool = nullptr);
Bsr export_bsr(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes);

}  // namespace lacuna::layout
