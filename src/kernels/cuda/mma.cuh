// src/kernels/cuda/mma.cuh - one-instruction wrappers of warp-wide matrix products and of what feeds them (PTX ISA:
// mma.m16n8k16 and .m16n8k8, ldmatrix, cp.async). For .cu files only.
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

/// 16 rows by 16 columns, and 16 by 8, of halves over a warp.
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
/// The first 8 columns of A and rows of B alone: r[0] and r[1], and r[0].
__device__ __forceinline__ void multiply_half(float sums[4], const MmaA& a, const MmaB& b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a.r[0]), "r"(a.r[1]), "r"(b.r[0]));
}

}  // namespace lacuna::cuda
