// src/kernels/cuda/prepared.h - zigzag weights as the CUDA kernels read them. Plain C++, in every build.
// A group of weights of one layout is a matrix of R superblock rows (256 outputs each, every part padded to whole ones)
// and K columns. The codes and the header of a superblock lie apart:
//   codes   [R][K][code_bytes]    lane l of a warp has outputs 8l to 8l + 7
//   header  [R][K][header_bytes]  scales and mins
// Codes are stored as the layout has them (not negative; zz8: plus 128), in planes of the superblock. What lane l reads
// of each, lowest bits first, with the output of each place counted from 8l:
//   zz2_k  pairs u16[32]: 0 to 7                                   header scale_min u8[16], d, dmin
//   zz3_k  pairs of bits 0 and 1 u16[32]: 0 to 7; bit 2 u8[32]:
//          0 4 1 5 2 6 3 7                                         header scale u8[12], d, two zeros
//   zz4_k  nibbles u32[32]: 0 to 7                                 header d, dmin, scale_min u8[12]
//   zz5_k  nibbles as zz4_k; bit 4 u8[32]: 0 4 2 6 1 5 3 7         header as zz4_k
//   zz6_k  nibbles as zz4_k; bits 4 and 5 u16[32]: 0 2 1 3 4 6 5 7  header scale i8[16], d, two zeros
//   zz8    bytes u8[256]: 0 1 4 5 2 3 6 7                          header scale f16[8]
// The orders are those that let the kernel take two codes at a time with the fewest instructions (frag_*.cuh).
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
