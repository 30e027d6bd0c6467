// src/io/import_bitmask.h - compressed-tensors' pruned weights: a mask and the values that it keeps.
//
//   shape        [2]: N, K
//   bitmask      U8 [N, ceil(K / 8)], bit k % 8 of byte k / 8: input k is kept
//   row_offsets  [N], the place of a row's first value (sparse-bitmask only)
//   compressed   the kept values, row after row: [kept], or [N, K / 2] in sparse-24-bitmask, where two of every four
//                weights are kept
#pragma once

#include <cstdint>
#include <vector>

#include "io/import.h"

namespace lacuna::io {

struct Bitmask {
  layout::Shape shape;
  std::vector<uint8_t> keep;   // [N, K]
  std::vector<int64_t> start;  // [N + 1] of each row's values
};

/// Throws Error unless shape, mask, offsets and number of values agree.
Bitmask read_bitmask(const ModuleTensors& module);

/// F16, BF16 or F32 values: bm16 where f16 holds each of them, else all weights as rows of their own type.
ImportedMatrix import_values(const FileTensor& compressed, const Bitmask& mask, ThreadPool* pool);

}  // namespace lacuna::io
