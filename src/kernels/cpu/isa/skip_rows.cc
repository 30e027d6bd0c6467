// src/kernels/cpu/isa/skip_rows.cc - the row kernel for one token (linear_rows.cc), walking the active inputs only.
//
// A superblock's codes and scales are unpacked once; nearly every superblock has active inputs, so that all of W is
// read.
#include "kernels/cpu/skip_rows.h"

#include "kernels/cpu/isa/linear_blocks.h"

namespace lacuna::cpu::LACUNA_ISA {

void skip_rows_q4_K(const SkipRowsArgs& a) {
  using Block = Q4K::Block;
  const int64_t units = a.K / Block::kCols;
  for (int64_t n = a.row0; n < a.row1; ++n) {
    const std::byte* row = a.weight + n * units * int64_t(sizeof(Block));
    float total = 0;
    for (int64_t u = 0; u < units; ++u) {
      if (a.start[Q4K::kBlocks * u] == a.start[Q4K::kBlocks * (u + 1)]) continue;
      Block block;
      __builtin_memcpy(&block, row + u * int64_t(sizeof(Block)), sizeof(Block));
      Fields fields;
      Q4K::read(block, fields);
      for (int i = 0; i < Q4K::kBlocks; ++i) {
        const int64_t b = Q4K::kBlocks * u + i;
        const uint8_t* codes = fields.code + 32 * i;
        float even = 0, odd = 0;
        int32_t at = a.start[b];
        const int32_t end = a.start[b + 1];
        for (; at + 1 < end; at += 2) {
          even += float(codes[a.place[at]]) * a.x[at];
          odd += float(codes[a.place[at + 1]]) * a.x[at + 1];
        }
        if (at < end) even += float(codes[a.place[at]]) * a.x[at];
        total += Q4K::scale(fields, i) * (even + odd) + Q4K::min(fields, i) * a.sum[b];
      }
    }
    a.y[n] = total;
  }
}

}  // namespace lacuna::cpu::LACUNA_ISA
