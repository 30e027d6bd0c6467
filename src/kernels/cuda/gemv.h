// src/kernels/cuda/gemv.h - y[N] = W[N,K] x[K] of one token with prepared zigzag weights (prepared.h), dense or
// skipping the inputs that are not active. Plain C++.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernels/cuda/device.h"
#include "layout/layout.h"

namespace lacuna::cuda {

/// Prepared weights in device memory, see prepared.h.
struct Columns {
  const std::byte* codes = nullptr;
  const std::byte* headers = nullptr;
  int64_t rows = 0, K = 0;  // superblock rows of 256 outputs
};

enum class Inputs : uint8_t {
  dense,
  threshold,  // input k counts unless |x[k]| < threshold (times norms[k]): equality, NaN and infinity count
  list,       // those of a list count
  walk,       // as threshold, without an even split: a baseline (baselines.h), no plan has it
};

/// How the work is shared out. A block of `warps` warps has one superblock row and one of `segments` equal ranges of
/// the columns (of the list); its warps share the active ones of these evenly, `chunk` in flight at a time each.
struct GemvPlan {
  int warps = 8, chunk = 32;
  int resident = 24;  // warps that a multiprocessor holds: what the registers are counted for
  int segments = 1;
  /// Shares of each segment's headers and codes that a sparse launch asks for before it knows which columns count,
  /// while the launch before it ends and memory is idle. Dense launches load all weights early as they are.
  float early_headers = 0, early_codes = 0;
  /// False, of a product that could leave inputs out: it is faster dense, with the plan of dense inputs; launch_gemv()
  /// does not look at it.
  bool skips = true;
  bool operator==(const GemvPlan&) const = default;
};
std::string describe(const GemvPlan& plan);

/// Sums in a fixed order: every run gives the same bits. Without it blocks add to y as they end.
struct Workspace {
  float* partial = nullptr;      // [segments, 256 rows]
  uint32_t* arrived = nullptr;   // [rows] zeros; zeros again when the launch has ended
  const float* start = nullptr;  // [256 rows] added to the sums: biases; nullptr: zeros
};

/// All pointers are of device memory.
struct GemvArgs {
  Columns weights;
  Inputs inputs = Inputs::dense;
  const float* x = nullptr;   // [K]
  const float* up = nullptr;  // [K]: the inputs are silu(x[k]) * up[k] (SwiGLU); nullptr: they are x. Not with a list
  float threshold = 0;
  const float* norms = nullptr;   // [K]: inputs count by |x[k]| * norms[k], or nullptr
  const int32_t* list = nullptr;  // ascending, in [0, K)
  const int32_t* count = nullptr;
  /// [256 rows], aligned to 16 bytes, zeros before the launch (with a workspace anything). Outputs from a part's N to
  /// the next multiple of 256 mean nothing.
  float* y = nullptr;
  /// Set to zeros on the way, for a launch after this one. A multiple of 4 floats, aligned to 16 bytes.
  float* zero = nullptr;
  int64_t zero_count = 0;
  Workspace workspace;
  /// A sibling reads the inputs of the launch before it in the stream and writes other outputs: weights of one input in
  /// several layouts. The two may run at the same time: the first lets the second start when their inputs are there,
  /// and the second waits for the first only before it ends. A sibling's `zero` must be nullptr.
  bool has_sibling = false;  // the next launch is a sibling
  bool is_sibling = false;
};

/// The kernels that exist for a layout, `segments` left open: what a tuner tries.
std::span<const GemvPlan> kernel_plans(const layout::Layout& layout);
/// A good one for shape and device.
GemvPlan default_plan(const DeviceInfo& device, const layout::Layout& layout, const Columns& weights, Inputs inputs);
/// `plan` with so many segments that its warps fill this share of the device.
GemvPlan filled(const DeviceInfo& device, const Columns& weights, GemvPlan plan, double share);
/// Columns that a segment may have, and how many segments there may be.
inline constexpr int64_t kSegmentColumns = 1024, kMostSegments = 256;

/// The product. Each factor x * scale is rounded to f16 twice (zz8: once) and sums of eight products are f16's,
/// relative to the largest factor of the chunk: about 1e-3 of the result's size (zz8: 5e-4); sums beyond are f32. |x *
/// d| (zz8: |x * scale|) from 2^102 on may count as infinite. On compute capability 9.0 the launch may begin before the
/// one before it in the stream has ended; it waits for it before it reads x, list or count, or writes anything (a
/// sibling: before it ends). Throws Error for a plan that no kernel has, and for too few or too many segments.
void launch_gemv(const Device& device, Stream& stream, const layout::Layout& layout, const GemvPlan& plan,
                 const GemvArgs& args);

struct GemvFewArgs {
  Columns weights;
  int64_t M = 0;             // tokens, 1 to kMostFewColumns
  const float* x = nullptr;  // [M, K], rows x_stride apart
  int64_t x_stride = 0;
  /// [M, 256 rows], rows y_stride apart (a multiple of 4), as GemvArgs::y: results are added to it, or, with a
  /// workspace, stored.
  float* y = nullptr;
  int64_t y_stride = 0;
  Workspace workspace;  // partial: [M, segments, 256 rows]
};
inline constexpr int64_t kMostFewColumns = 4;
/// Ranges of the columns that a launch of few tokens has.
int few_segments(const DeviceInfo& device, const Columns& weights);
/// y = x W^T of a few tokens, dense: weights are read once for all of them. Rounds as launch_gemv() does. Throws Error
/// for a layout that no kernel reads, and for more tokens.
void launch_gemv_few(const Device& device, Stream& stream, const layout::Layout& layout, const GemvFewArgs& args);

}  // namespace lacuna::cuda
