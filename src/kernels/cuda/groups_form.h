// src/kernels/cuda/groups_form.h - group-sparse weights (layout/gs.h) as the CUDA kernels read them. Plain C++, in
// every build.
//
// Weights of one layout that read one input are taken in panels of 256 rows (each part padded to whole ones). A slot is
// a kept group of a panel's row. A panel's slots are sorted by place (inputs g i to g (i + 1) are place i), then by
// row; 16 that follow each other are a tile, and 8 tiles a chunk, a record of fixed size. A tile has slots of two
// places at most: where a third would begin, the rest of the tile has scale 0 (gs16: values 0), and so has the end of a
// panel's last chunk. Each panel has a chunk at least. A chunk's parts follow each other:
//   word   u32[kPieces][..]   codes as a warp's matrix product wants them, see below
//   scale  f16[32][4]         not gs16. Lane l: slots l / 4 and l / 4 + 8 of tile l % 4, then of tile l % 4 + 4
//   row    u8[32][4]          in the panel; the order as scale's
//   zero   [32] of 4 codes of kWidth bits, low ones first; not gs16. The order as scale's
//   place  u32[4][2]          of tiles i and i + 4: bits 0 to 15 the first place, 16 to 26 how far on the second is, 27
//                             to 31 how many slots (1 to 16) are of the first
// A half-step is 8 inputs of a tile: lane l has inputs 2 (l % 4) and the next of slots l / 4 and l / 4 + 8. A piece is
// kHalf half-steps of each tile, tile by tile, and kWords words of each lane: four words (or all, where there are
// fewer) of a lane lie together, [kWords / 4][32][4]. Codes take kWidth bits (3 bits take 4). A word holds kPositions
// half-steps: bits kWidth p of its bytes hold, for half-step p, slot l / 4 (bytes 0 and 2, of the two inputs) and slot
// l / 4 + 8 (bytes 1 and 3). Codes of 8 bits have one half-step a word. gs16: two words a half-step, f16 of two
// inputs each, of slot l / 4 and then of slot l / 4 + 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/huge_buffer.h"
#include "core/thread_pool.h"
#include "kernels/linear.h"
#include "layout/layout.h"

namespace lacuna::cuda {

inline constexpr int kPanelRows = 256, kTileSlots = 16, kChunkTiles = 8, kChunkSlots = kTileSlots * kChunkTiles;

/// Most places from a tile's first one to its second.
inline constexpr int kMostStep = 2047;

/// Sizes of a chunk.
struct GroupForm {
  int bits = 0, group = 0;
  bool coded = true;  // else values
  int width = 0;      // bits of a code here; 16: values
  int positions = 0;  // half-steps of a word; 0: values
  int half = 0;       // half-steps of a tile in a piece
  int pieces = 0;     // of a chunk
  int words = 0;      // of a lane and piece
  int scale_at = 0, row_at = 0, zero_at = 0, place_at = 0, bytes = 0;

  constexpr GroupForm(int b, int g)
      : bits(b), group(g), coded(b != 16), width(b == 3 ? 4 : b), positions(b == 16 ? 0 : 8 / width) {
    const int most = positions > 2 ? positions : 2;
    half = g / 8 < most ? g / 8 : most;
    pieces = g / 8 / half;
    words = !coded ? kChunkTiles * half * 2 : kChunkTiles * half / positions;
    scale_at = pieces * words * 32 * 4;
    row_at = scale_at + (coded ? kChunkSlots * 2 : 0);
    zero_at = row_at + kChunkSlots;
    place_at = zero_at + (coded ? kChunkSlots * width / 8 : 0);
    bytes = place_at + kChunkTiles * 4;
  }
  /// Words of a lane that lie together.
  constexpr int together() const { return words < 4 ? words : 4; }
};

/// Records of four rows of a panel (units_form.h): one at least.
struct Quad {
  uint32_t first = 0, end = 0;
};

/// How weights are prepared: as this header says, or as units_form.h does, for a kernel that is faster.
enum class GroupsForm : uint8_t { chunks, units };

struct PreparedGroups {
  const layout::Layout* layout = nullptr;
  int64_t panels = 0, K = 0, group = 0;
  HugeBuffer chunks;
  std::vector<uint32_t> start;    // [panels + 1]: chunks before each panel; units: quads
  std::vector<Quad> quads;        // of units
  std::vector<uint32_t> quad_of;  // of units: of each record
  /// [panels] of chunks: at least sum_k |w| of each row of the panel, where every |scale (code - zero)| is finite.
  std::vector<float> bound;
  std::vector<float> scale;           // [panels * 256]: Operand::scale (gemm.h) of each row
  std::vector<int64_t> first_output;  // of each part, a multiple of 256

  int64_t bytes() const;
};

/// Whether the CUDA kernels read the layout in this form.
bool is_group_layout(const layout::Layout& layout);
/// Upper bound of PreparedGroups::bytes() of a part, from its parameters alone.
int64_t most_group_bytes(const kernels::WeightView& part);
/// form: nothing: units where they can hold the weights. Throws Error, naming the weight, for parts of different
/// layouts, K or group sizes, for more inputs than the kernels take, and for units where there are none.
PreparedGroups prepare_groups(std::span<const kernels::WeightView> parts, ThreadPool& pool,
                              std::optional<GroupsForm> form = std::nullopt);

}  // namespace lacuna::cuda
