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

/// The parts of prepared weights one after the other, as put(offset, bytes) puts them into memory at `base`. Offsets
/// are multiples of 16.
template <class Put>
Groups lay_out(const PreparedGroups& w, const std::byte* base, const Put& put) {
  int64_t end = 0;
  const auto next = [&]<class T>(std::span<const T> values) {
    const auto bytes = std::as_bytes(values);
    const int64_t at = std::exchange(end, end + (int64_t(bytes.size()) + 15) / 16 * 16);
    if (!bytes.empty()) put(at, bytes);
    return bytes.empty() ? nullptr : reinterpret_cast<const T*>(base + at);
  };
  Groups out;
  out.chunks = next(w.chunks.bytes());
  out.start = next(std::span<const uint32_t>(w.start));
  out.bound = next(std::span<const float>(w.bound));
  out.quads = next(std::span<const Quad>(w.quads));
  out.quad_of = next(std::span<const uint32_t>(w.quad_of));
  out.panels = w.panels, out.K = w.K, out.group = w.group;
  out.count = w.quads.empty() ? w.start.back() : int64_t(w.quad_of.size());
  out.quad_count = int64_t(w.quads.size());
  return out;
}
/// Bytes that lay_out() takes.
int64_t laid_out_bytes(const PreparedGroups& w);

/// How chunks or records are shared out over blocks.
enum class Split : uint8_t {
  stream,  // stream-K: every block has as many chunks as every other, across the ends of panels; of records too, but
           // for those of a quad, and every warp of a block as many as every other
  slice,   // slice-K: every panel has the same number of blocks, which share its chunks; blocks and warps have the same
           // number of quads
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
  bool operator==(const GroupsPlan&) const = default;
};
std::string describe(const GroupsPlan& plan);

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
  /// Set to zeros on the way, for a launch after this one. A multiple of 4 floats, aligned to 16 bytes.
  float* zero = nullptr;
  int64_t zero_count = 0;
  /// As Workspace says; partial: groups_partial_bytes(), arrived: [panels].
  Workspace workspace;
};

/// What a tuner tries, `blocks` left open.
std::span<const GroupsPlan> groups_plans(const layout::Layout& layout, const Groups& weights);
/// `plan` with as many blocks as the device holds at once.
GroupsPlan filled(const DeviceInfo& device, const Groups& weights, GroupsPlan plan);
GroupsPlan default_plan(const DeviceInfo& device, const layout::Layout& layout, const Groups& weights);
/// Bytes of Workspace::partial for any plan of `blocks` blocks.
int64_t groups_partial_bytes(const Groups& weights, int64_t blocks);

/// The product. Chunks: inputs are rounded to f16 after a multiplication with a power of two that brings the largest of
/// those that a block reads of a panel to [2^14, 2^15): each is off by 2^-11 of itself, or 2^-33 of that largest.
/// Products and the sums of a group are f32. Sums over the groups of a row are integers, 2^30 for
/// PreparedGroups::bound times 2^15: whatever the order in which they come, a block's sum is the same bits. Where an
/// input that a block reads for a panel, or a weight, is not finite, the panel's outputs are not a number.
/// Units: inputs are rounded to 2^-16 of the largest of their 16 (those of less than 1e-30 to zeros), a unit's sum is
/// exact, sums of units are f32. An output is not a number where an input or a weight that its row keeps is not finite.
/// With a workspace sums come in an order that the launch decides alone; without one blocks add to y as they end. On
/// compute capability 9.0 the launch may begin before the one before it in the stream has ended; it waits for it before
/// it reads x or writes anything. Throws Error for a plan that no kernel has.
void launch_groups(const Device& device, Stream& stream, const layout::Layout& layout, const GroupsPlan& plan,
                   const GroupsArgs& args);

/// Outputs [first, first + to.rows) as an operand (gemm.h), each value rounded to f16 once. to.scale, of output
/// `first`, is read: PreparedGroups::scale. first: a multiple of 256.
void launch_gemm_weights(const Device& device, Stream& stream, const layout::Layout& layout, const Groups& weights,
                         int64_t first, const Operand& to);

}  // namespace lacuna::cuda
