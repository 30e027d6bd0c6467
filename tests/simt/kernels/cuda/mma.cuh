// tests/simt/kernels/cuda/mma.cuh - stands in for src/kernels/cuda/mma.cuh: places of elements as the PTX ISA has them.
#pragma once

#include <array>
#include <bit>
#include <cstring>

#include "core/e4m3.h"
#include "core/scalar.h"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {

// Copies arrive at once.
inline void copy_some_async(void* to, const void* from, int bytes) {
  std::memset(to, 0, 16);
  std::memcpy(to, from, size_t(bytes));
}
inline void copy_async(void* to, const void* from, bool valid = true) { copy_some_async(to, from, valid ? 16 : 0); }
inline void commit_copies() {}
template <int kLeft>
void wait_for_copies() {}

struct MmaA {
  uint32_t r[4];
};
struct MmaB {
  uint32_t r[2];
};
struct MmaSparseB {
  uint32_t r[4];
};

/// ldmatrix.x4: register i of a lane is word lane % 4 of the 16 bytes at the address of lane 8 i + lane / 4.
inline std::array<uint32_t, 4> load_matrices(const void* from) {
  return simt::with_all(from, [](const void* const* rows) {
    const size_t lane = threadIdx.x % 32;
    std::array<uint32_t, 4> out;
    for (size_t i = 0; i < 4; ++i)
      std::memcpy(&out[i], static_cast<const std::byte*>(rows[8 * i + lane / 4]) + 4 * (lane % 4), 4);
    return out;
  });
}
inline MmaA load_a(const void* from) { return std::bit_cast<MmaA>(load_matrices(from)); }
inline MmaSparseB load_sparse_b(const void* from) { return std::bit_cast<MmaSparseB>(load_matrices(from)); }
inline void load_b(const void* from, MmaB& first, MmaB& second) {
  const std::array<uint32_t, 4> r = load_matrices(from);
  first = {{r[0], r[1]}}, second = {{r[2], r[3]}};
}

/// Value i of a register of one type or another.
struct HalfValues {
  static constexpr int kCount = 2;
  static double at(uint32_t r, int i) { return i == 0 ? __low2float(as_half2(r)) : __high2float(as_half2(r)); }
};
struct Bf16Values {
  static constexpr int kCount = 2;
  static double at(uint32_t r, int i) { return lacuna::to_float(bf16{uint16_t(r >> (16 * i))}); }
};
struct E4m3Values {
  static constexpr int kCount = 4;
  static double at(uint32_t r, int i) { return lacuna::to_float(e4m3{uint8_t(r >> (8 * i))}); }
};

/// Adds product(all lanes, row, column) to each sum of a lane.
template <class Operands, class Product>
void add_products(float sums[4], const Operands& mine, const Product& product) {
  simt::with_all(mine, [&](const Operands* all) {
    const int lane = int(threadIdx.x) % 32;
    for (int e = 0; e < 4; ++e) sums[e] = float(sums[e] + product(all, lane / 4 + e / 2 * 8, lane % 4 * 2 + e % 2));
    return 0;
  });
}

/// sums += A B over the first kSteps of two: pieces of 16 bytes of a row of A and a column of B.
template <class Values, int kSteps = 2>
void multiply_all(float sums[4], const MmaA& a, const MmaB& b) {
  struct Both {
    MmaA a;
    MmaB b;
  };
  add_products(sums, Both{a, b}, [](const Both* all, int row, int column) {
    double sum = 0;
    for (int step = 0; step < kSteps; ++step)
      for (int t = 0; t < 4; ++t)
        for (int i = 0; i < Values::kCount; ++i)
          sum += Values::at(all[row % 8 * 4 + t].a.r[row / 8 + 2 * step], i) *
                 Values::at(all[column * 4 + t].b.r[step], i);
    return sum;
  });
}
/// The same of a 2:4 A. places(metadata of all lanes, row, four): the 4 bits of a group of four columns.
template <class Values, class Places>
void multiply_sparse(float sums[4], const MmaA& a, const MmaSparseB& b, uint32_t metadata, const Places& places) {
  struct All {
    MmaA a;
    MmaSparseB b;
    uint32_t metadata;
  };
  add_products(sums, All{a, b, metadata}, [&](const All* all, int row, int column) {
    constexpr int kOfPiece = 4 * Values::kCount;  // values of 16 bytes
    double sum = 0;
    for (int kept = 0; kept < 2 * kOfPiece; ++kept) {
      const uint32_t four = places(all, row, kept / 2);
      const int k = kept / 2 * 4 + int(four >> (2 * (kept % 2)) & 3);
      const uint32_t of_a = all[row % 8 * 4 + kept % kOfPiece / Values::kCount].a.r[row / 8 + kept / kOfPiece * 2];
      const uint32_t of_b = all[column * 4 + k % kOfPiece / Values::kCount].b.r[k / kOfPiece];
      sum += Values::at(of_a, kept % Values::kCount) * Values::at(of_b, k % Values::kCount);
    }
    return sum;
  });
}

inline void multiply(float sums[4], const MmaA& a, const MmaB& b) { multiply_all<HalfValues>(sums, a, b); }
inline void multiply_half(float sums[4], const MmaA& a, const MmaB& b) { multiply_all<HalfValues, 1>(sums, a, b); }
inline void multiply_bf16(float sums[4], const MmaA& a, const MmaB& b) { multiply_all<Bf16Values>(sums, a, b); }
inline void multiply_e4m3(float sums[4], const MmaA& a, const MmaB& b) { multiply_all<E4m3Values>(sums, a, b); }

// Which lane's metadata is that of four columns: kernels/cuda/tensor_core_form.h.
template <int kSelector>
void multiply_sparse_bf16(float sums[4], const MmaA& a, const MmaSparseB& b, uint32_t metadata) {
  multiply_sparse<Bf16Values>(sums, a, b, metadata, [](const auto* all, int row, int four) {
    return all[row % 8 * 4 + 2 * kSelector + four / 4].metadata >> (16 * (row / 8) + 4 * (four % 4)) & 15;
  });
}
inline void multiply_sparse_e4m3(float sums[4], const MmaA& a, const MmaSparseB& b, uint32_t metadata) {
  multiply_sparse<E4m3Values>(sums, a, b, metadata, [](const auto* all, int row, int four) {
    return all[row % 8 * 4 + four / 8 * 2 + row / 8].metadata >> (4 * (four % 8)) & 15;
  });
}

}  // namespace lacuna::cuda
