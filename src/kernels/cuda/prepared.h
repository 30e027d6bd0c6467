// src/kernels/cuda/prepared.h - zigzag weights as the CUDA kernels read them. Plain C++, in every build.
// A group of weights of one layout is a matrix of R superblock rows (256 outputs each, every part padded to whole ones)
// and K columns. The codes and the header of a superblock lie apart:
//   codes   [R][K][code_bytes]    lane l of a warp has outputs 8l to 8l + 7
//   header  [R][K][header_bytes]  scales and mins
// zz4_k: codes are 32 words, nibble i of word l is output 8l + i; the header is the first 16 bytes of the superblock.
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
