// src/kernels/cuda/mma.cuh - one-instruction wrappers of warp-wide matrix products and of what feeds them (PTX ISA:
// mma, mma.sp, ldmatrix, cp.async). For .cu files only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lacuna::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

/// 16 bytes from global to shared memory, both aligned. `valid` false: zeros.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
/// The first `bytes` (0 to 16) of 16, then zeros; what lies after them is not read.
__device__ __forceinline__ void copy_some_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
/// 4 bytes, as above.
__device__ __forceinline__ void copy_word_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kLeft of the committed groups are under way.
template <int kLeft>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// 16 rows by 16 columns, and 16 by 8, of halves over a warp; or as many bytes of other values.
struct MmaA {
  uint32_t r[4];
};
struct MmaB {
  uint32_t r[2];
};
/// from: 16 bytes of row lane % 16, columns 8 (lane / 16) on.
__device__ __forceinline__ MmaA load_a(const void* from) {
  MmaA a;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3])
               : "r"(shared_address(from))
               : "memory");
  return a;
}
/// Two neighbours of a matrix stored by columns of B. from: column 8 (lane / 16) + lane % 8, rows 8 (lane / 8 % 2) on.
__device__ __forceinline__ void load_b(const void* from, MmaB& first, MmaB& second) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(first.r[0]), "=r"(first.r[1]), "=r"(second.r[0]), "=r"(second.r[1])
               : "r"(shared_address(from))
               : "memory");
}
/// The same of a matrix stored by rows of B. from: row lane % 16, columns 8 (lane / 16) on.
__device__ __forceinline__ void load_b_rows(const void* from, MmaB& first, MmaB& second) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(first.r[0]), "=r"(first.r[1]), "=r"(second.r[0]), "=r"(second.r[1])
               : "r"(shared_address(from))
               : "memory");
}
/// sums += A B. Sums 0 and 1: row lane / 4, columns 2 (lane % 4) and the next; 2 and 3: row lane / 4 + 8.
__device__ __forceinline__ void multiply(float sums[4], const MmaA& a, const MmaB& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
}
/// The same of bf16.
__device__ __forceinline__ void multiply_bf16(float sums[4], const MmaA& a, const MmaB& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
}
/// The same of e4m3: 16 rows by 32 columns, 32 by 8. From compute capability 8.9 on.
__device__ __forceinline__ void multiply_e4m3(float sums[4], const MmaA& a, const MmaB& b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
}

/// Beside a 2:4 A, whose MmaA holds the values that are kept: 32 rows by 8 columns of halves.
struct MmaSparseB {
  uint32_t r[4];
};
/// A matrix stored by columns of B. from: column lane % 8, rows 8 (lane / 8) on.
__device__ __forceinline__ MmaSparseB load_sparse_b(const void* from) {
  MmaSparseB b;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b.r[0]), "=r"(b.r[1]), "=r"(b.r[2]), "=r"(b.r[3])
               : "r"(shared_address(from))
               : "memory");
  return b;
}
// Places of a group of four ascend, which the instruction can be told from PTX ISA 8.5 on; without that word it may be
// much slower (PTX ISA, mma.sp).
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 5)
#define LACUNA_MMA_SPARSE "mma.sp::ordered_metadata.sync.aligned."
#else
#define LACUNA_MMA_SPARSE "mma.sp.sync.aligned."
#endif
/// sums += A B of bf16, A 2:4, 16 rows by 32 columns. metadata: as tensor_core_form.h says of `lanes`; kSelector: which
/// two lanes of each four hold that of these columns, 0 or 1.
template <int kSelector>
__device__ __forceinline__ void multiply_sparse_bf16(float sums[4], const MmaA& a, const MmaSparseB& b,
                                                     uint32_t metadata) {
  asm volatile(LACUNA_MMA_SPARSE
               "m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
               "{%0, %1, %2, %3}, %12, %13;"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]), "r"(b.r[2]), "r"(b.r[3]),
                 "r"(metadata), "n"(kSelector));
}
/// The same of e4m3, 16 rows by 64 columns; every lane's metadata counts. From compute capability 8.9 on.
__device__ __forceinline__ void multiply_sparse_e4m3(float sums[4], const MmaA& a, const MmaSparseB& b,
                                                     uint32_t metadata) {
  asm volatile(LACUNA_MMA_SPARSE
               "m16n8k64.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, "
               "{%0, %1, %2, %3}, %12, 0x0;"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]), "r"(b.r[2]), "r"(b.r[3]),
                 "r"(metadata));
}
#undef LACUNA_MMA_SPARSE

/// The first 8 columns of A and rows of B alone, of halves: r[0] and r[1], and r[0].
__device__ __forceinline__ void multiply_half(float sums[4], const MmaA& a, const MmaB& b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a.r[0]), "r"(a.r[1]), "r"(b.r[0]));
}

}  // namespace lacuna::cuda
