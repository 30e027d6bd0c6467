// tests/simt/kernels/cuda/mma.cuh - stands in for src/kernels/cuda/mma.cuh: places of elements as the PTX ISA has them.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

struct MmaA {
  uint32_t r[4];
};
struct MmaB {
  uint32_t r[2];
};

/// sums += A B over the first kInner columns of A.
template <int kInner>
void multiply_all(float sums[4], const MmaA& a, const MmaB& b) {
  struct Both {
    MmaA a;
    MmaB b;
  };
  simt::with_all(Both{a, b}, [&](const Both* all) {
    const auto element = [](uint32_t pair, int i) {
      return i == 0 ? __low2float(as_half2(pair)) : __high2float(as_half2(pair));
    };
    const int lane = int(threadIdx.x) % 32;
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
      double sum = sums[e];
      for (int k = 0; k < kInner; ++k)
        sum += double(element(all[row % 8 * 4 + k % 8 / 2].a.r[row / 8 + k / 8 * 2], k % 2)) *
               double(element(all[column * 4 + k % 8 / 2].b.r[k / 8], k % 2));
      sums[e] = float(sum);
    }
    return 0;
  });
}
inline void multiply(float sums[4], const MmaA& a, const MmaB& b) { multiply_all<16>(sums, a, b); }
inline void multiply_half(float sums[4], const MmaA& a, const MmaB& b) { multiply_all<8>(sums, a, b); }

}  // namespace lacuna::cuda
