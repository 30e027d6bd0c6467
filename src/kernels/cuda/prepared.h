// src/kernels/cuda/prepared.h - zigzag weights as the CUDA kernels read them. Plain C++, in every build.
// A group of weights of one layout is a matrix of R superblock rows (256 outputs each, every part padded to whole ones)
// and K columns. The codes and the header of a superblock lie apart:
//   codes   [R][K][code_bytes]    see below
//   header  [R][K][header_bytes]  scales and mins
// Codes are stored as the layout has them (not negative; zz8: plus 128), in one or two planes of the superblock. Lane l
// of a warp has outputs 8l to 8l + 7 and reads one number of each plane. The lower half of its bits is of outputs 8l to
// 8l + 3, the upper half of the other four, so that one operation takes a code out of each; p is the output's place
// among the four. From the lowest bit of a half on:
//   zz2_k  u16[32]: p = 0, 1, 2, 3                        header: scale_min u8[16], d, dmin
//   zz3_k  u16[32]: p = 0, 1, bits 0 and 1 of p = 2
//          u8[32]:  p = 3, bit 2 of p = 2                 header: scale u8[12], d, two zeros
//   zz4_k  u32[32]: p = 0, 1, 2, 3                        header: d, dmin, scale_min u8[12]
//   zz5_k  u32[32]: p = 0, 1, 2, bit 4 of p = 3
//          u8[32]:  bits 0 to 3 of p = 3                  header: as zz4_k
//   zz6_k  u32[32]: p = 0, 1, bits 2 to 5 of p = 2
//          u16[32]: bits 0 and 1 of p = 2, p = 3          header: scale i8[16], d, two zeros
//   zz8    u32[32][2]: p = 0, 1; p = 2, 3                 header: scale f16[8]
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/huge_buffer.h"
#include "core/thread_pool.h"
#include "kernels/linear.h"
#include "layout/layout.h"

namespace lacuna::cuda {

struct ColumnForm {
  layout::Id id;
  int64_t code_bytes, header_bytes;
  /// One superblock. codes, header: as many bytes as above says.
  void (*prepare)(const std::byte* superblock, std::byte* codes, std::byte* header);
};

/// Throws Error for a layout that the CUDA kernels do not read.
const ColumnForm& column_form(const layout::Layout& layout);

/// Columns after the last one whose codes the kernels may read; they do not count.
inline constexpr int64_t kSlackColumns = 7;

struct PreparedGroup {
  const layout::Layout* layout = nullptr;
  int64_t rows = 0, K = 0;            // superblock rows
  HugeBuffer codes, headers;          // codes with the slack
  std::vector<int64_t> first_output;  // of each part, a multiple of 256

  int64_t bytes() const { return int64_t(codes.size() + headers.size()); }
};

/// Throws Error, naming the weight, for parts of different layouts or K, and for a layout that no kernel reads.
PreparedGroup prepare_group(std::span<const kernels::WeightView> parts, ThreadPool& pool);

}  // namespace lacuna::cuda
