// src/kernels/cpu/isa/linear_float.cc - f32, f16 and bf16 weights times float inputs, read in place.
//
// Products of a weight and an input are exact or rounded once in float, sums are float in 16 lanes: as close to the
// float32 model as another order of summation.
#include "kernels/cpu/isa/linear_table.h"
#include "kernels/cpu/isa/linear_vec.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

struct F32 {
  static constexpr layout::Id kId = layout::Id::f32;
  static constexpr int64_t kBytes = 4;
  LACUNA_INLINE F32x16 load(const std::byte* p) { return load_f32(p); }
};
struct F16 {
  static constexpr layout::Id kId = layout::Id::f16;
  static constexpr int64_t kBytes = 2;
  LACUNA_INLINE F32x16 load(const std::byte* p) { return load_f16(p); }
};
struct Bf16 {
  static constexpr layout::Id kId = layout::Id::bf16;
  static constexpr int64_t kBytes = 2;
  LACUNA_INLINE F32x16 load(const std::byte* p) { return load_bf16(p); }
};

/// R rows times T tokens.
template <class W, int R, int T>
LACUNA_INLINE void tile(const LinearArgs& a, int64_t n, int64_t t) {
  F32x16 sum[R][T];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < T; ++i) sum[r][i] = splat(0.0f);
  const std::byte* w = a.weight + n * a.K * W::kBytes;
  const float* x = a.x.x + t * a.x.x_stride;
  int64_t k = 0;
  for (; k + 16 <= a.K; k += 16) {
    F32x16 weight[R];
    for (int r = 0; r < R; ++r) weight[r] = W::load(w + (r * a.K + k) * W::kBytes);
    for (int i = 0; i < T; ++i) {
      const F32x16 input = load_f32(x + i * a.x.x_stride + k);
      for (int r = 0; r < R; ++r) sum[r][i] = mul_add(weight[r], input, sum[r][i]);
    }
  }
  if (k < a.K) {  // the rest, padded with zeros on both sides
    const size_t rest = size_t(a.K - k);
    F32x16 weight[R];
    for (int r = 0; r < R; ++r) {
      std::byte padded[64] = {};
      __builtin_memcpy(padded, w + (r * a.K + k) * W::kBytes, rest * size_t(W::kBytes));
      weight[r] = W::load(padded);
    }
    for (int i = 0; i < T; ++i) {
      float padded[16] = {};
      __builtin_memcpy(padded, x + i * a.x.x_stride + k, rest * 4);
      const F32x16 input = load_f32(padded);
      for (int r = 0; r < R; ++r) sum[r][i] = mul_add(weight[r], input, sum[r][i]);
    }
  }
  for (int i = 0; i < T; ++i)
    for (int r = 0; r < R; ++r) {
      const float value = reduce_add(sum[r][i]);
      a.y[(t + i) * a.y_stride + n + r] = a.bias == nullptr ? value : value + a.bias[n + r];
    }
}

template <class W, int R>
void run_rows(const LinearArgs& a, int64_t n) {
  constexpr int kTokens = 4;
  int64_t t = 0;
  for (; t + kTokens <= a.x.tokens; t += kTokens) tile<W, R, kTokens>(a, n, t);
  for (; t < a.x.tokens; ++t) tile<W, R, 1>(a, n, t);
}

template <class W>
void run(const LinearArgs& a) {
  int64_t n = a.row0;
  for (; n + 4 <= a.row1; n += 4) run_rows<W, 4>(a, n);
  for (; n < a.row1; ++n) run_rows<W, 1>(a, n);
}

template <class W>
bool can_run(const Problem& p) {
  return p.layout == W::kId;
}

template <class W>
constexpr LinearKernel row(const char* name, const char* one, const char* many) {
  return {name, can_run<W>, {}, nullptr, nullptr, one, many, run<W>, run<W>};
}
/// Other layouts: 16 rows at a time are decoded and multiplied as floats.
bool can_decode(const Problem& p) {
  const layout::Layout& layout = layout::get(p.layout);
  return layout.family != layout::Family::rows && !layout.zigzag;
}
bool can_decode_e4m3(const Problem& p) { return can_decode(p) && layout::has_e4m3_codes(layout::get(p.layout)); }
int64_t decoded_bytes(int64_t K) { return kPanelRows * K * int64_t(sizeof(float)); }
void run_decoded(const LinearArgs& a) {
  for (int64_t n = a.row0; n < a.row1; n += kPanelRows) {
    const int64_t rows = a.row1 - n < kPanelRows ? a.row1 - n : kPanelRows;
    decode_rows(*a.view, n, rows, reinterpret_cast<float*>(a.scratch));
    LinearArgs part = a;
    part.weight = a.scratch;
    part.bias = a.bias == nullptr ? nullptr : a.bias + n;
    part.y = a.y + n;
    part.row0 = 0;
    part.row1 = rows;
    run<F32>(part);
  }
}
constexpr LinearKernel kDecodedKernels[] = {
    {"decoded_e4m3",
     can_decode_e4m3,
     {.e4m3 = true},
     nullptr,
     nullptr,
     "gemv_decoded_e4m3",
     "gemm_decoded_e4m3",
     run_decoded,
     run_decoded,
     decoded_bytes},
    {"decoded",
     can_decode,
     {},
     nullptr,
     nullptr,
     "gemv_decoded",
     "gemm_decoded",
     run_decoded,
     run_decoded,
     decoded_bytes},
};

constexpr LinearKernel kFloatKernels[] = {
    row<F32>("rows_f32", "gemv_rows_f32", "gemm_rows_f32"),
    row<F16>("rows_f16", "gemv_rows_f16", "gemm_rows_f16"),
    row<Bf16>("rows_bf16", "gemv_rows_bf16", "gemm_rows_bf16"),
};

}  // namespace

KernelList decoded_kernels() { return {kDecodedKernels, sizeof(kDecodedKernels) / sizeof(kDecodedKernels[0])}; }
KernelList float_kernels() { return {kFloatKernels, sizeof(kFloatKernels) / sizeof(kFloatKernels[0])}; }

}  // namespace lacuna::cpu::LACUNA_ISA
