// src/kernels/cpu/isa/linear_rows.cc - block layouts read in place, row by row, for those who are short of memory.
//
// A canonical block is unpacked into bytes once for up to 8 tokens and multiplied with the quantized inputs.
#include "kernels/cpu/isa/linear_blocks.h"
#include "kernels/cpu/isa/linear_table.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

template <int kCount>
LACUNA_INLINE int32_t dot(const uint8_t* codes, const int8_t* x) {
  int32_t sum = 0;
  for (int i = 0; i < kCount; ++i) sum += int32_t(codes[i]) * int32_t(x[i]);
  return sum;
}

template <class L, bool kPlanes>
void run(const LinearArgs& a) {
  using Block = typename L::Block;
  constexpr int kGroups = kGroupsOf<L>;
  const int64_t units = a.K / Block::kCols, tokens = a.x.tokens;
  for (int64_t n = a.row0; n < a.row1; ++n) {
    const std::byte* row = a.weight + n * units * int64_t(sizeof(Block));
    float sums[kMaxTile] = {};
    for (int64_t u = 0; u < units; ++u) {
      Block block;
      __builtin_memcpy(&block, row + u * int64_t(sizeof(Block)), sizeof(Block));
      Fields fields;
      L::read(block, fields);
      for (int i = 0; i < L::kBlocks; ++i) {
        const int64_t b = u * L::kBlocks + i;
        float scale[kGroups], min[kGroups];
        for (int g = 0; g < kGroups; ++g) {
          scale[g] = L::scale(fields, kGroups * i + g);
          min[g] = L::min(fields, kGroups * i + g);
        }
        for (int64_t t = 0; t < tokens; ++t) {
          const int64_t at = b * tokens + t;
          float sum = 0;
          for (int g = 0; g < kGroups; ++g) {
            int32_t acc = dot<L::kGroup>(fields.code + 32 * i + L::kGroup * g, a.x.codes + 32 * at + L::kGroup * g);
            if constexpr (L::kOffset != 0) acc += a.x.start[kGroups * at + g];
            sum += float(acc) * a.x.scale[at] * scale[g];
            if constexpr (L::kMin) sum += min[g] * a.x.sum[kGroups * at + g];
          }
          sums[t] += sum;
        }
      }
    }
    if constexpr (kPlanes) sums[0] += sums[1];
    for (int64_t t = 0; t < (kPlanes ? 1 : tokens); ++t)
      a.y[t * a.y_stride + n] = a.bias == nullptr ? sums[t] : sums[t] + a.bias[n];
  }
}

template <class L>
bool can_run(const Problem& p) {
  return p.layout == L::kId && p.prepare == kernels::Prepare::in_place && p.shape.K % L::Block::kCols == 0;
}

template <class L>
constexpr LinearKernel row(const char* name, const char* one, const char* many) {
  return {name,    can_run<L>,   {.quantized = true, .offset = L::kOffset, .group = L::kGroup, .sums = L::kMin},
          nullptr, nullptr,      one,
          many,    run<L, true>, run<L, false>};
}
#define LACUNA_ROW(L, name) row<L>("rows_" name, "gemv_rows_" name, "gemm_rows_" name)
constexpr LinearKernel kRowKernels[] = {
    LACUNA_ROW(Q4_0, "q4_0"), LACUNA_ROW(Q4_1, "q4_1"), LACUNA_ROW(Q5_0, "q5_0"), LACUNA_ROW(Q5_1, "q5_1"),
    LACUNA_ROW(Q8_0, "q8_0"), LACUNA_ROW(Q2K, "q2_K"),  LACUNA_ROW(Q3K, "q3_K"),  LACUNA_ROW(Q4K, "q4_K"),
    LACUNA_ROW(Q5K, "q5_K"),  LACUNA_ROW(Q6K, "q6_K"),
};
#undef LACUNA_ROW

}  // namespace

KernelList row_kernels() { return {kRowKernels, sizeof(kRowKernels) / sizeof(kRowKernels[0])}; }

}  // namespace lacuna::cpu::LACUNA_ISA
