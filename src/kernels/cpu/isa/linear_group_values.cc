// src/kernels/cpu/isa/linear_group_values.cc - gs16: kept groups of f16 weights times float inputs, read in place.
#include "kernels/cpu/group_sparse.h"
#include "kernels/cpu/isa/linear_table.h"
#include "kernels/cpu/isa/linear_vec.h"

namespace lacuna::cpu::LACUNA_ISA {
namespace {

/// `count` <= 16 numbers, then zeros.
LACUNA_INLINE F32x16 load_inputs(const float* x, int64_t count) {
  if (count >= 16) return load_f32(x);
  float padded[16] = {};
  __builtin_memcpy(padded, x, size_t(count) * 4);
  return load_f32(padded);
}
LACUNA_INLINE F32x16 load_weights(const std::byte* p, int64_t count) {
  if (count >= 16) return load_f16(p);
  std::byte padded[32] = {};
  __builtin_memcpy(padded, p, size_t(count) * 2);
  return load_f16(padded);
}

/// Row n times T tokens from t on.
template <int T>
LACUNA_INLINE void multiply(const LinearArgs& a, const GroupValues& w, int64_t n, int64_t t) {
  uint32_t start;
  __builtin_memcpy(&start, a.weight + 4 * n, 4);
  const std::byte* value = w.values + int64_t{start} * 2 * w.group;
  const std::byte* mask = w.mask + n * w.mask_row;
  const float* x = a.x.x + t * a.x.x_stride;
  F32x16 sum[T];
  for (int i = 0; i < T; ++i) sum[i] = splat(0.0f);
  for (int64_t byte = 0; byte < w.mask_row; ++byte) {
    for (auto left = uint32_t(mask[byte]); left != 0; left &= left - 1) {
      const int64_t k0 = (8 * byte + __builtin_ctz(left)) * w.group;
      for (int64_t k = k0; k < k0 + w.group; k += 16) {
        const int64_t of_group = k0 + w.group - k, of_row = a.K - k, count = of_group < of_row ? of_group : of_row;
        if (count <= 0) break;
        const F32x16 weight = load_weights(value + 2 * (k - k0), of_group);
        for (int i = 0; i < T; ++i) sum[i] = mul_add(weight, load_inputs(x + i * a.x.x_stride + k, count), sum[i]);
      }
      value += 2 * w.group;
    }
  }
  for (int i = 0; i < T; ++i) {
    const float y = reduce_add(sum[i]);
    a.y[(t + i) * a.y_stride + n] = a.bias == nullptr ? y : y + a.bias[n];
  }
}

void run(const LinearArgs& a) {
  constexpr int kTokens = 4;
  const GroupValues w = group_values(*a.view);
  for (int64_t n = a.row0; n < a.row1; ++n) {
    int64_t t = 0;
    for (; t + kTokens <= a.x.tokens; t += kTokens) multiply<kTokens>(a, w, n, t);
    for (; t < a.x.tokens; ++t) multiply<1>(a, w, n, t);
  }
}

bool can_run(const Problem& p) { return p.layout == layout::Id::gs16; }

constexpr LinearKernel kernel() {
  LinearKernel out{.name = "rows_gs16",
                   .can_run = can_run,
                   .needs = {},
                   .prepared_bytes = nullptr,
                   .prepare = nullptr,
                   .one_name = "gemv_rows_gs16",
                   .many_name = "gemm_rows_gs16",
                   .run_one = run,
                   .run_many = run};
  out.work_before = group_sparse_work;
  return out;
}
constexpr LinearKernel kGroupValueKernels[] = {kernel()};

}  // namespace

KernelList group_value_kernels() { return {kGroupValueKernels, 1}; }

}  // namespace lacuna::cpu::LACUNA_ISA
