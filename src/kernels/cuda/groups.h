// src/kernels/cuda/groups.h - y[N] = W[N,K] x[K] of one token with prepared group-sparse weights (groups_form.h). Plain
// C++.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups_form.h"
#include "kernels/cuda/units_form.h"
#include "layout/layout.h"

namespace lacuna::cuda {

/// Prepared weights in device memory, as chunks (groups_form.h) or as units (units_form.h).
struct Groups {
  const std::byte* chunks = nullptr;  // or records; aligned to 16 bytes
  const uint32_t* start = nullptr;    // [panels + 1]: chunks, or quads, before each panel
  const float* bound = nullptr;       // [panels], of chunks
  const Quad* quads = nullptr;        // [quad_count] of units; nullptr: chunks
  const uint32_t* quad_of = nullptr;  // [count]
  int64_t panels = 0, K = 0, group = 0;
  int64_t count = 0;  // chunks or records
  int64_t quad_count = 0;

  bool are_units() const { return quads != nullptr; }
};

/// Where the parts of prepared weights lie one after the other: put(offset, bytes), offsets are multiples of 16.
template <class Put>
void each_part(const PreparedGroups& w, const Put& put) {
  int64_t end = 0;
  for (const auto bytes : {w.chunks.bytes(), std::as_bytes(std::span(w.start)), std::as_bytes(std::span(w.bound)),
                           std::as_bytes(std::span(w.quads)), std::as_bytes(std::span(w.quad_of))}) {
    put(end, bytes);
    end += (int64_t(bytes.size()) + 15) / 16 * 16;
  }
}
/// The weights whose parts have been put so into memory at `base`.
Groups laid_out(const PreparedGroups& w, const std::byte* base);
/// Bytes of all parts.
int64_t laid_out_bytes(const PreparedGroups& w);

/// How chunks or records are shared out over blocks.
enum class Split : uint8_t {
  stream,  // stream-K: every block has as many chunks as every other, across the ends of panels. Records: every warp of
           // the launch has as many as every other; in a fixed order a block has whole quads, about as many records as
           // every other block, and its warps equally many of them
  slice,   // slice-K: every panel has the same number of blocks, which share its chunks. Records: blocks and warps have
           // the same number of quads
};
enum class Math : uint8_t {
  mma,  // tensor cores
  fma,  // multiply-adds of single lanes: what mma is measured against
  dot,  // products of four bytes: of units
};

/// A kernel: blocks of `warps` warps, whose registers are counted for `resident` warps of a multiprocessor.
struct GroupsPlan {
  int warps = 8, resident = 16;
  Split split = Split::stream;
  Math math = Math::mma;
  int blocks = 0;  // of the launch; slice: of chunks, a multiple of the panels
  int early = 0;   // records or chunks of each warp that the launch before asks for in L2 (GroupsArgs::next)
  bool operator==(const GroupsPlan&) const = default;
};
inline constexpr int kMostEarly = 1 << 20;  // all
std::string describe(const GroupsPlan& plan);

/// Weights of a later launch of which L2 is asked for the first `early` records of each of `shares` ranges, which
/// follow each other and are as long as each other (`larger` of them longer by one).
struct Upcoming {
  const std::byte* records = nullptr;  // or chunks
  uint32_t record_bytes = 0, shares = 0, of_share = 0, larger = 0, early = 0;
};
/// What the launch of `weights` with `plan` reads first.
Upcoming upcoming(const layout::Layout& layout, const Groups& weights, const GroupsPlan& plan);

/// Activations as the kernel takes them.
enum class InputBits : uint8_t {
  half,  // rounded to f16 (11 bits); of units to -32767 to 32767 times one scale for each 16 inputs
  int8,  // rounded to -127 to 127 times one scale for each group of inputs, of units
         // for each 16: W4A8
};

/// All pointers are of device memory.
struct GroupsArgs {
  Groups weights;
  InputBits input_bits = InputBits::half;
  const float* x = nullptr;      // [K], aligned to 16 bytes
  const float* up = nullptr;     // [K]: the inputs are silu(x[k]) * up[k]; nullptr: they are x
  float threshold = 0;           // > 0: inputs that are not active (kernels/active.h) are taken as zeros
  const float* norms = nullptr;  // [K], of the threshold
  /// [256 panels], aligned to 16 bytes. Without a workspace results are added to it. Outputs from a part's N to the
  /// next multiple of 256 mean nothing.
  float* y = nullptr;
  /// Of units: what launch_group_inputs() made of the inputs; nullptr: every block makes it for itself.
  const std::byte* ready = nullptr;
  /// Set to zeros on the way, for a launch after this one. A multiple of 4 floats, aligned to 16 bytes.
  float* zero = nullptr;
  int64_t zero_count = 0;
  /// Asked for as soon as each warp's own weights are under way, so that memory does not rest between launches.
  Upcoming next;
  /// As Workspace says; partial: groups_partial_bytes(), arrived: [panels].
  Workspace workspace;
};

/// What a tuner tries of weights that are units or chunks, `blocks` left open.
std::span<const GroupsPlan> groups_plans(const layout::Layout& layout, bool units);
/// `plan` with as many blocks as the device holds at once.
GroupsPlan filled(const DeviceInfo& device, const Groups& weights, GroupsPlan plan);
/// `plan` with the nearest number of blocks that launch_groups() takes for these weights.
GroupsPlan fitted(const Groups& weights, GroupsPlan plan);
GroupsPlan default_plan(const DeviceInfo& device, const layout::Layout& layout, const Groups& weights);
/// Bytes of Workspace::partial for any plan of `blocks` blocks, more than 0: units need none but ask for a fixed order
/// by one that is there.
int64_t groups_partial_bytes(const Groups& weights, int64_t blocks);

/// The product. Chunks: inputs are rounded to f16 after a multiplication with a power of two that brings the largest of
/// those that a block reads of a panel to [2^14, 2^15): each is off by 2^-11 of itself, or 2^-33 of that largest.
/// Products and the sums of a group are f32. Sums over the groups of a row are integers, 2^30 for
/// PreparedGroups::bound times 2^15: whatever the order in which they come, a block's sum is the same bits. Where an
/// input that a block reads for a panel, or a weight, is not finite, the panel's outputs are not a number.
/// Units: inputs are rounded to 2^-16 of the largest of their 16 (those of less than 1e-30 to zeros), a unit's sum is
/// exact, sums of units are f32. An output is not finite where an input or a weight that its row keeps is not.
/// With a workspace sums come in an order that the launch decides alone; without one blocks add to y as they end. On
/// compute capability 9.0 the launch may begin before the one before it in the stream has ended; it waits for it before
/// it reads x or writes anything. Throws Error for a plan that no kernel has.
void launch_groups(const Device& device, Stream& stream, const layout::Layout& layout, const GroupsPlan& plan,
                   const GroupsArgs& args);

/// Bytes of GroupsArgs::ready of K inputs.
int64_t group_inputs_bytes(int64_t K);
/// Writes the inputs that `args` describes (input_bits, x, up, threshold, norms, weights.K) to `to`, aligned to 16
/// bytes, as GroupsArgs::ready of all products that read them. Throws Error for weights that are no units.
void launch_group_inputs(const Device& device, Stream& stream, const GroupsArgs& args, std::byte* to);

/// Outputs [first, first + to.rows) as an operand (gemm.h), each value rounded to f16 once. to.scale, of output
/// `first`, is read: PreparedGroups::scale. first: a multiple of 256.
void launch_gemm_weights(const Device& device, Stream& stream, const layout::Layout& layout, const Groups& weights,
                         int64_t first, const Operand& to);

}  // namespace lacuna::cuda
