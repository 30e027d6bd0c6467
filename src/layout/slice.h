// src/layout/slice.h - some outputs and inputs of a matrix as a matrix of its own in the same layout: what one of
// several devices gets. Nothing is decoded: the weights are the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "layout/layout.h"

namespace lacuna::layout {

/// Outputs [row0, row0 + rows), inputs [column0, column0 + columns).
struct Slice {
  int64_t row0 = 0, rows = 0, column0 = 0, columns = 0;
};

/// Outputs that cannot be parted: a slice begins, and ends but at N, at a multiple of this. 256 of zigzag layouts.
int64_t row_unit(const Layout& layout);
/// The same of inputs: a block, a group, or eight (whole bytes of codes and masks).
int64_t column_unit(const Layout& layout, Shape shape, Params params);

/// The params of a slice: what a layout counts (octets, kept groups, nnz) is counted.
Params slice_params(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                    const Slice& slice);
/// Its bytes. params: of the whole matrix, whose bytes are sound (Layout::first_bad).
std::vector<std::byte> slice_bytes(const Layout& layout, Shape shape, Params params, std::span<const std::byte> bytes,
                                   const Slice& slice, ThreadPool* pool = nullptr);

}  // namespace lacuna::layout
