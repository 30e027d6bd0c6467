// src/kernels/cpu/isa/linear_panels.cc - block layouts repacked into panels of 16 rows.
//
// A panel holds 16 rows, one per int32 lane, in exactly as many bits as the canonical blocks:
//   codes   [K/32][64 * (kLow + kHigh)]  per block of 32 inputs a low and a high plane of bits. Vector j = 0..7 holds
//           inputs 4j..4j+3 of the 16 rows as bytes; bits of vector j lie in register j % bits of the plane, shifted
//           left by bits * (j / bits).
//   scales  [K / (32 * kBlocks)][kBytes]  as the layout's family of scales says
// Rows past N are zero. The multiplication keeps the unpacked codes of 32 inputs in registers and walks the tokens.
#include "kernels/cpu/isa/linear_blocks.h"
#include "kernels/cpu/isa/linear_panel.h"
#include "kernels/cpu/isa/linear_table.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

template <class L>
constexpr int kCodeBytes = 64 * (L::kLow + L::kHigh);  // of one block of 32 inputs

template <class L>
int64_t panel_bytes(int64_t K) {
  const int64_t bytes = K / kBlock * kCodeBytes<L> + K / (kBlock * L::kBlocks) * L::kBytes;
  return odd_lines(bytes);
}

template <class L>
int64_t prepared_bytes(const Problem& p) {
  return (p.shape.N + kPanelRows - 1) / kPanelRows * panel_bytes<L>(p.shape.K);
}

template <int kBits>
LACUNA_INLINE void add_to_plane(uint32_t codes, int vector, int row, int shift, uint32_t mask, uint32_t* plane) {
  plane[16 * (vector % kBits) + row] |= ((codes >> shift) & mask) << (kBits * (vector / kBits));
}

template <class L>
void prepare(const Problem& p, int64_t row0, int64_t row1, std::byte* prepared) {
  using Block = typename L::Block;
  constexpr int kUnit = L::kBlocks;  // blocks of 32 in a canonical block
  static_assert(Block::kCols == kBlock * kUnit);
  const std::byte* canonical = p.bytes.data();
  const layout::Shape shape = p.shape;
  const int64_t units = shape.K / Block::kCols, stride = panel_bytes<L>(shape.K);
  constexpr uint32_t kLowMask = 0x01010101u * ((1u << L::kLow) - 1), kHighMask = 0x01010101u * ((1u << L::kHigh) - 1);
  for (int64_t n = row0; n < row1; ++n) {
    const int r = int(n % kPanelRows);
    auto* panel = reinterpret_cast<uint8_t*>(prepared + n / kPanelRows * stride);
    uint8_t* scales = panel + shape.K / kBlock * kCodeBytes<L>;
    const std::byte* row = canonical + n * units * int64_t(sizeof(Block));
    for (int64_t u = 0; u < units; ++u) {
      Block block;
      __builtin_memcpy(&block, row + u * int64_t(sizeof(Block)), sizeof(Block));
      Fields fields;
      L::read(block, fields);
      L::write(fields, r, scales + u * L::kBytes);
      for (int b = 0; b < kUnit; ++b) {
        // Prepared memory starts as zeros and each row adds its own dwords.
        auto* low = reinterpret_cast<uint32_t*>(panel + (u * kUnit + b) * kCodeBytes<L>);
        uint32_t* high = low + 16 * L::kLow;
        for (int j = 0; j < 8; ++j) {
          uint32_t four;
          __builtin_memcpy(&four, fields.code + 32 * b + 4 * j, 4);
          add_to_plane<L::kLow>(four, j, r, 0, kLowMask, low);
          if constexpr (L::kHigh > 0) add_to_plane<L::kHigh>(four, j, r, L::kLow, kHighMask, high);
        }
      }
    }
  }
}

/// Unrolled where the blocks of a superblock would otherwise wait for their variable shifts; narrow registers have
/// neither the room nor the need.
#if defined(__AVX512BW__)
#define LACUNA_UNROLL_BLOCKS _Pragma("GCC unroll 8")
#else
#define LACUNA_UNROLL_BLOCKS
#endif

/// One token in two planes: one panel at a time, the sums stay in registers.
template <class L>
void run_one(const LinearArgs& a) {
  constexpr int kGroups = kGroupsOf<L>;
  constexpr int kVectors = 8 / kGroups;  // of a group
  const int64_t stride = panel_bytes<L>(a.K), units = a.K / (kBlock * L::kBlocks);
  for (int64_t n = a.row0; n < a.row1; n += kPanelRows) {
    const auto* codes = reinterpret_cast<const uint8_t*>(a.weight + n / kPanelRows * stride);
    const uint8_t* scales = codes + a.K / kBlock * kCodeBytes<L>;
    F32x16 sum = splat(0.0f);
    for (int64_t u = 0; u < units; ++u, scales += L::kBytes) {
      const typename L::Head head = L::head(scales);
      LACUNA_UNROLL_BLOCKS
      for (int i = 0; i < L::kBlocks; ++i, codes += kCodeBytes<L>) {
        const int64_t b = u * L::kBlocks + i;
        ask_ahead(codes, kPrefetch, kCodeBytes<L>, a.far);
        BlockScales<kGroups> s;
        L::load(head, scales, i, s);
        const int8_t* x = a.x.codes + 2 * b * kBlock;
        F32x16 part = splat(0.0f);
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
          I32x16 coarse = splat(int32_t{0}), fine = coarse;
          if constexpr (L::kOffset != 0) {
            coarse = splat(a.x.start[kGroups * 2 * b + g]);
            fine = splat(a.x.start[kGroups * (2 * b + 1) + g]);
          }
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const int j = g * kVectors + v;
            const U32x16 four = load_codes<L::kLow, L::kHigh>(codes, j);
            coarse = dot4<kMaxCodeOf<L>>(coarse, four, splat4(x + 4 * j));
            fine = dot4<kMaxCodeOf<L>>(fine, four, splat4(x + kBlock + 4 * j));
          }
          const F32x16 both = mul_add(to_f32(fine), splat(1 / kPlaneRatio), to_f32(coarse));
          part = g == 0 ? both * s.scale[0] : mul_add(both, s.scale[g], part);
          if constexpr (L::kMin) sum = mul_add(s.min[g], splat(a.x.sum[kGroups * 2 * b + g]), sum);
        }
        sum = mul_add(part, splat(a.x.scale[2 * b]), sum);
      }
    }
    store_rows(a, n, 0, sum);
  }
}

/// Many tokens on P neighbouring panels: the codes of 32 inputs are unpacked once and stay in registers for all tokens.
template <class L, int P>
void run_panels(const LinearArgs& a, int64_t n) {
  constexpr int kGroups = kGroupsOf<L>;
  constexpr int kVectors = 8 / kGroups;
  const int64_t stride = panel_bytes<L>(a.K), units = a.K / (kBlock * L::kBlocks), tokens = a.x.tokens;
  const auto* panel = reinterpret_cast<const uint8_t*>(a.weight + n / kPanelRows * stride);
  const uint8_t* panel_scales = panel + a.K / kBlock * kCodeBytes<L>;
  alignas(64) float sums[kMaxTile][16 * P];
  __builtin_memset(sums, 0, size_t(tokens) * sizeof(sums[0]));
  for (int64_t u = 0; u < units; ++u) {
    typename L::Head head[P];
    for (int p = 0; p < P; ++p) head[p] = L::head(panel_scales + p * stride + u * L::kBytes);
    for (int i = 0; i < L::kBlocks; ++i) {
      const int64_t b = u * L::kBlocks + i;
      U32x16 codes[P][8];
      BlockScales<kGroups> s[P];
      for (int p = 0; p < P; ++p) {
        L::load(head[p], panel_scales + p * stride + u * L::kBytes, i, s[p]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j)
          codes[p][j] = load_codes<L::kLow, L::kHigh>(panel + p * stride + b * kCodeBytes<L>, j);
      }
      const int8_t* x = a.x.codes + b * tokens * kBlock;
      const float* x_scale = a.x.scale + b * tokens;
      const int32_t* start = a.x.start + kGroups * b * tokens;
      const float* x_sum = a.x.sum + kGroups * b * tokens;
      for (int64_t t = 0; t < tokens; ++t, x += kBlock) {
        F32x16 sum[P];
        for (int p = 0; p < P; ++p) sum[p] = load_f32(&sums[t][16 * p]);
        F32x16 part[P];
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
          I32x16 acc[P];
          for (int p = 0; p < P; ++p) {
            acc[p] = splat(int32_t{0});
            if constexpr (L::kOffset != 0) acc[p] = splat(start[kGroups * t + g]);
          }
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const RegI four = splat4(x + 4 * (g * kVectors + v));
            for (int p = 0; p < P; ++p) acc[p] = dot4<kMaxCodeOf<L>>(acc[p], codes[p][g * kVectors + v], four);
          }
          for (int p = 0; p < P; ++p) {
            part[p] = g == 0 ? to_f32(acc[p]) * s[p].scale[0] : mul_add(to_f32(acc[p]), s[p].scale[g], part[p]);
            if constexpr (L::kMin) sum[p] = mul_add(s[p].min[g], splat(x_sum[kGroups * t + g]), sum[p]);
          }
        }
        const F32x16 scale = splat(x_scale[t]);
        for (int p = 0; p < P; ++p) store_f32(&sums[t][16 * p], mul_add(part[p], scale, sum[p]));
      }
    }
  }
  for (int64_t t = 0; t < tokens; ++t)
    for (int p = 0; p < P; ++p) store_rows(a, n + p * kPanelRows, t, load_f32(&sums[t][16 * p]));
}

template <class L>
void run_many(const LinearArgs& a) {
  int64_t n = a.row0;
  for (; n + kPanelRows < a.row1; n += 2 * kPanelRows) run_panels<L, 2>(a, n);
  if (n < a.row1) run_panels<L, 1>(a, n);
}

template <class L>
bool can_run(const Problem& p) {
  return p.layout == L::kId && p.prepare == kernels::Prepare::automatic && p.shape.K % L::Block::kCols == 0;
}

template <class L>
constexpr LinearKernel row(const char* name, const char* one, const char* many) {
  return {name,
          can_run<L>,
          {.quantized = true, .offset = L::kOffset, .group = L::kGroup, .sums = L::kMin},
          prepared_bytes<L>,
          prepare<L>,
          one,
          many,
          run_one<L>,
          run_many<L>};
}
#define LACUNA_PANEL_ROW(L, name) row<L>("panels_" name, "gemv_panels_" name, "gemm_panels_" name)
constexpr LinearKernel kPanelKernels[] = {
    LACUNA_PANEL_ROW(Q4K, "q4_K"),  LACUNA_PANEL_ROW(Q6K, "q6_K"),  LACUNA_PANEL_ROW(Q4_0, "q4_0"),
    LACUNA_PANEL_ROW(Q4_1, "q4_1"), LACUNA_PANEL_ROW(Q5_0, "q5_0"), LACUNA_PANEL_ROW(Q8_0, "q8_0"),
    LACUNA_PANEL_ROW(Q5_1, "q5_1"), LACUNA_PANEL_ROW(Q5K, "q5_K"),  LACUNA_PANEL_ROW(Q2K, "q2_K"),
    LACUNA_PANEL_ROW(Q3K, "q3_K"),
};
#undef LACUNA_PANEL_ROW

}  // namespace

KernelList panel_kernels() { return {kPanelKernels, sizeof(kPanelKernels) / sizeof(kPanelKernels[0])}; }

}  // namespace lacuna::cpu::LACUNA_ISA
