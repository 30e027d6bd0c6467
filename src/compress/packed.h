// src/compress/packed.h - what compression made of one layer: stored bytes, and the file in a work folder that keeps
// them until the whole model is done.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "solver/problem.h"

namespace lacuna::compress {

/// A tensor in the form that the file will hold.
struct PackedTensor {
  std::string name;  // "blk.3.attn_q.weight"
  const layout::Layout* layout = nullptr;
  layout::Params params;
  std::vector<int64_t> dims;  // slowest first
  std::vector<std::byte> bytes;
};

/// The layout that holds what a grid and a pattern make: gqB for integers without dropped weights, bmB with, bm16 for
/// dropped weights without a grid, gsB and gs16 where the groups that are dropped are those that share a scale. Throws
/// Error when neither is asked for.
const layout::Layout& automatic_layout(const solver::Grid& grid, const solver::Pattern& pattern);
/// Throws Error that says why when the layout cannot hold such solutions. nm24_q4 holds 4 bits under 2:4 on symmetric
/// grids of 64 inputs; gsB holds B bits, gs16 none, under a pattern of groups that are the grid's (grid.group_size is
/// the pattern's, also without bits).
void check_layout(const layout::Layout& layout, const solver::Grid& grid, const solver::Pattern& pattern);

/// Packs a solution. Where it has codes, what the bytes decode to is the solution's weight to the last bit (checked);
/// where it has none, its weights rounded to f16. Throws Error naming the tensor for values that f16 cannot hold.
PackedTensor pack(const std::string& name, const solver::Solution& solution, const layout::Layout& layout,
                  const solver::Grid& grid);
/// A vector as f32.
PackedTensor pack_vector(const std::string& name, const at::Tensor& values);

/// decode(bytes): [N, K] float32, [n] of a vector.
at::Tensor unpack(const PackedTensor& tensor);

/// One layer's tensors with the rows of the report (JSON) that were made with them.
struct PackedLayer {
  std::vector<PackedTensor> tensors;
  std::string report;
};
/// Written under its name only when it is whole.
void write_layer(const std::string& path, const PackedLayer& layer);
/// Throws Error naming the file when it is damaged.
PackedLayer read_layer(const std::string& path);

}  // namespace lacuna::compress
