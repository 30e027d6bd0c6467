// src/kernels/cuda/rows.h - weights of a row layout on a device: y[M,N] = x[M,K] W[N,K]^T (+ bias) of one token or a
// few, and rows of an embedding. Plain C++.
//
// Prepared form. A row's blocks are split into planes, each aligned to 16 bytes in its row: all codes of the row, then
// all high bits, then all scales, so that the lanes of a warp read 16 bytes each, side by side. Columns 32u to 32u + 31
// are unit u. Codes of a unit, 16 bytes: byte j holds bits 0..3 of weight j (low nibble) and of weight j + 16. What is
// above (and all of 2- and 3-bit codes), one or two bits a weight: bit (or pair of bits) t of byte b belongs to weight
// 4t + b. As many bytes as the canonical blocks, but for q3_K (scales in whole bytes) and a row's padding.
// Grouped rows (layout/gq.h), and nm24_q4 with code 8 where nothing is kept: the same planes of codes, the last unit
// filled up with zeros, then of each group f16 scale, f16 zero. Groups are of a multiple of 16 inputs, or the whole
// row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/thread_pool.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/share.h"
#include "layout/layout.h"

namespace lacuna::cuda {

inline constexpr int kMostPlanes = 4;
struct RowPlane {
  int64_t bytes = 0;    // of one entry
  int64_t columns = 1;  // that an entry is of
};
struct RowForm {
  layout::Id id;
  RowPlane planes[kMostPlanes];
  /// Splits one canonical block: writes its part of every plane. nullptr: the canonical row is the only plane.
  void (*split)(const std::byte* block, std::byte* const* planes);
};
/// Throws Error for a layout that is no row layout.
const RowForm& row_form(const layout::Layout& layout);
/// Where each plane starts in a prepared row of K columns, then the bytes of the row: a multiple of 16.
struct RowPlaces {
  int64_t plane[kMostPlanes] = {};
  int64_t row_bytes = 0;
  uint32_t group_factor = 0;  // of group_of()
};
/// The planes of scales and zeros, and of masks, of grouped and bitmask rows.
inline constexpr int kGroupPlane = kMostPlanes - 1, kMaskPlane = 2;
/// Throws Error for a layout or a group size that the kernels do not read.
RowPlaces row_places(const layout::Layout& layout, int64_t K, layout::Params params = {});
/// The group of columns 16 half to 16 half + 15.
LACUNA_HOST_DEVICE inline uint32_t group_of(uint32_t half, uint32_t factor) {
  return uint32_t(uint64_t{half} * factor >> 31);
}

/// bytes: canonical, shape.N rows; out: shape.N * row_places(layout, shape.K, params).row_bytes bytes.
void prepare_rows(const layout::Layout& layout, layout::Shape shape, layout::Params params,
                  std::span<const std::byte> bytes, ThreadPool& pool, std::byte* out);

/// Prepared rows in device memory, aligned to 16 bytes.
struct Rows {
  const layout::Layout* layout = nullptr;
  const std::byte* data = nullptr;
  int64_t N = 0, K = 0;
  layout::Params params = {};
};

/// A weight matrix of a group that reads one input (q, k, v; gate, up).
struct RowsPart {
  Rows weights;
  const float* bias = nullptr;  // [N]
  float* y = nullptr;           // [M, N], rows y_stride apart
};

struct RowsArgs {
  std::span<const RowsPart> parts;  // of one K; those of one layout and group size that follow each other run together
  const float* x = nullptr;         // [M, K], rows x_stride apart, aligned to 16 bytes
  /// > 0: inputs that are not active are taken as zeros (kernels/active.h). Every byte of W is read all the same.
  float threshold = 0;
  const float* norms = nullptr;  // [K]
  int64_t M = 1;                 // at most kMostFewRows tokens; strides are looked at where there are several
  int64_t x_stride = 0;          // a multiple of 4
  int64_t y_stride = 0;
};
inline constexpr int64_t kMostFewRows = 4;

/// The product, at most 4 parts; weights are read once for all tokens. Sums are f32 in a fixed order: every run gives
/// the same bits. Where x or a scale is not finite the results that depend on it are not finite. On compute
/// capability 9.0 the launch may begin before the one before it in the stream has ended; it waits for it before it
/// reads x or writes y.
void launch_rows(const Device& device, Stream& stream, const RowsArgs& args);

/// out[m] = row ids[m] of the matrix, as layout::decode_rows gives it, bit for bit (nm24_q4: zeros may be
/// negative).
/// ids: [M], out: [M, K]; an id outside [0, N) gives NaN.
void launch_embed(const Device& device, Stream& stream, const Rows& rows, const int32_t* ids, int64_t M, float* out);

}  // namespace lacuna::cuda
