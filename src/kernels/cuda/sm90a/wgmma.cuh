// src/kernels/cuda/sm90a/wgmma.cuh - one-instruction wrappers of Hopper's matrix products and bulk copies (PTX ISA:
// wgmma.mma_async, cp.async.bulk, mbarrier). For .cu files built for sm_90a only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/mma.cuh"

namespace lacuna::cuda {

// ---- barriers in shared memory ----

__device__ __forceinline__ void init_barrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
/// Makes barriers known to the copy engine.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
/// Arrives; the phase then ends once so many bytes have come, too.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// Global to shared memory by the copy engine, which then tells the barrier. Multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// ---- clusters of blocks ----

/// Waits for all threads of the cluster's blocks; what they wrote can then be read.
__device__ __forceinline__ void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Arrives at the barrier of the same place in a block of the cluster.
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
/// As copy_bulk, to the same place in every block of `ranks` (a bit each), whose barriers are told.
__device__ __forceinline__ void copy_bulk_to_all(void* to, const void* from, uint32_t bytes, uint64_t* barrier,
                                                 uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
}

// ---- products of a warpgroup ----

/// A matrix of rows of 128 bytes (64 halves) with swizzled pieces, its first row at `from`: eight rows are 1024 bytes
/// apart from the next eight. Adding 2 goes 16 columns on.
__device__ __forceinline__ uint64_t describe_matrix(const void* from) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32, kUnused = 1 << 16;
  return kSwizzle128 | kEightRows | kUnused | (shared_address(from) & 0x3ffff) >> 4;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

/// sums += A [64, 16] B [128, 16]^T, both in shared memory. Sum 4j + 2h + e of a thread: row 16 warp + lane / 4 + 8 h,
/// column 8 j + 2 (lane % 4) + e.
__device__ __forceinline__ void multiply_64x128(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b));
}

}  // namespace lacuna::cuda
