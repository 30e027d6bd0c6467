// src/kernels/cuda/units_form.h - group-sparse weights (layout/gs.h) of 2 to 4 bits and groups of 16 inputs or more, as
// the kernel of units.cuh reads them. Plain C++, in every build.
//
// A unit is 16 inputs of a kept group with its scale and zero. The rows of a panel (256 outputs) are sorted by how many
// units they have, and four that follow each other are a quad. A record has 16 units of each row of a quad, two for
// each of 32 lanes: lane 8 r + j has units of row r. Rows that have fewer than the quad's records hold, end with units
// of scale 0 whose inputs are those after the last. Lane j of a row takes units whose place (inputs 16 p to 16 p + 15)
// is j modulo 8, so that eight lanes read different banks of shared memory, as far as all get equally many. A record's
// parts follow each other:
//   code   [32][2] of 16 codes of kWidth bits (3 bits take 4). Byte i of word w holds, low bits first, codes i, i + 4,
//          ... of the word's 32 / kWidth
//   scale  f16[32][2]
//   index  u16[32][2]: bits 0 to 11 the place, 12 to 15 the zero
//   output u32[4]: bits 0 to 29 of each row the output, 256 times the panel and the row in it; bit 30 the quad begins
//          with this record, bit 31 it ends with it
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/groups_form.h"

namespace lacuna::cuda {

inline constexpr int kUnit = 16, kQuadRows = 4, kRowLanes = 8, kLaneUnits = 2;
inline constexpr int kRecordUnits = kRowLanes * kLaneUnits;  // of each row
inline constexpr int kMostPlaces = 4095;                     // so that the place after them has a number too

inline constexpr uint32_t kOutput = (1u << 30) - 1, kQuadBegins = 1u << 30, kQuadEnds = 1u << 31;

/// Sizes of a record.
struct UnitForm {
  int bits = 0;
  int width = 0;  // bits of a code here
  int words = 0;  // of a unit's codes
  int scale_at = 0, index_at = 0, output_at = 0, bytes = 0;

  constexpr explicit UnitForm(int b)
      : bits(b), width(b == 3 ? 4 : b), words(width / 2), scale_at(32 * kLaneUnits * words * 4) {
    index_at = scale_at + 32 * kLaneUnits * 2;
    output_at = index_at + 32 * kLaneUnits * 2;
    bytes = output_at + kQuadRows * 4;
  }
};

/// Whether weights can be prepared as units.
bool has_units(const layout::Layout& layout, int64_t group, int64_t K);
/// Upper bound of PreparedGroups::bytes() of a part as units.
int64_t most_unit_bytes(const kernels::WeightView& part);
/// Fills out.chunks (records), quads, quad_of and start (quads before each panel). out.panels, K, group and layout are
/// those of the parts.
void prepare_units(std::span<const kernels::WeightView> parts, ThreadPool& pool, PreparedGroups& out);

}  // namespace lacuna::cuda
