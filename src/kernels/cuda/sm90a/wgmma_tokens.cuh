// src/kernels/cuda/sm90a/wgmma_tokens.cuh - wgmma of e4m3 and bf16, dense and 2:4, for the widths of token tiles (PTX
// ISA: wgmma.mma_async and wgmma.mma_async.sp), and tiles by tensor map. For .cu files built for sm_90a only.
#pragma once

#include <cstdint>

#include "kernels/cuda/sm90a/wgmma.cuh"
#include "kernels/cuda/tensor_core.h"

namespace lacuna::cuda {

/// Arrives at sync_threads() of that barrier without waiting.
__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// A matrix of rows of 64 bytes with swizzled pieces, its first row at `from`, aligned to 512 bytes. Adding 2 goes 32
/// bytes on.
__device__ __forceinline__ uint64_t describe_narrow_matrix(const void* from) {
  constexpr uint64_t kSwizzle64 = uint64_t{2} << 62, kEightRows = uint64_t{512 >> 4} << 32, kUnused = 1 << 16;
  return kSwizzle64 | kEightRows | kUnused | (shared_address(from) & 0x3ffff) >> 4;
}

/// A matrix stored by rows of K, to be multiplied over its rows: 64 columns (128 bytes, pieces swizzled) a row, then,
/// at column_bytes, the next 64 columns of all rows. Adding 128 goes 16 rows on.
__device__ __forceinline__ uint64_t describe_turned_matrix(const void* from, uint32_t column_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{column_bytes >> 4} << 16 | (shared_address(from) & 0x3ffff) >> 4;
}

/// The box of `map` whose first byte and row are given to shared memory of every block of `ranks` (a bit each), whose
/// barriers are told; ranks 0: to this block alone. Past the ends of the matrix zeros come.
__device__ __forceinline__ void copy_box(void* to, const void* map, int byte, int row, uint64_t* barrier,
                                         uint16_t ranks) {
  if (ranks == 0)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(byte), "r"(row)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(byte), "r"(row), "h"(ranks)
        : "memory");
}

/// The same of a map of four dimensions, at coordinates x, y, z, w.
__device__ __forceinline__ void copy_box(void* to, const void* map, int x, int y, int z, int w, uint64_t* barrier,
                                         uint16_t ranks) {
  if (ranks == 0)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "h"(ranks)
        : "memory");
}

/// What this thread wrote to shared memory is there for the copy engine.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// A box of shared memory to the matrix of `map`, its first value at `column` of `row`; what lies past the matrix's
/// ends is left out. Counts once committed.
__device__ __forceinline__ void store_box(const void* map, const void* from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Until all but kLeft of this thread's commits have been read from shared memory.
template <int kLeft>
__device__ __forceinline__ void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
/// Until all of them are in memory.
__device__ __forceinline__ void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Ends the thread, with clusters once all threads of its cluster are here. kPlace tells the places of a kernel apart:
/// where paths of warps with different counts of registers meet again, ptxas gives each the fewest.
template <bool kClusters, int kPlace>
__device__ __forceinline__ void leave() {
  if constexpr (kClusters)
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;  // %0" ::"n"(kPlace) : "memory");
  asm volatile("exit;  // %0" ::"n"(kPlace) : "memory");
  __builtin_unreachable();
}

/// Four 8 x 8 matrices of 16-bit values, a register each, to shared memory, turned: `to` of lanes 8 i to 8 i + 7 are
/// the columns of matrix i, 16 bytes each.
__device__ __forceinline__ void store_turned(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(to)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

/// From now on the warpgroup's threads have kCount registers each; more: after another one gave them back.
template <int kCount, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The registers of a product, sixteen at a time.
#define LACUNA_LIST0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LACUNA_LIST1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LACUNA_LIST2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LACUNA_LIST3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LACUNA_LIST4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define LACUNA_LIST5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LACUNA_LIST6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define LACUNA_LIST7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LACUNA_LISTS32 LACUNA_LIST0 ", " LACUNA_LIST1
#define LACUNA_LISTS64 LACUNA_LISTS32 ", " LACUNA_LIST2 ", " LACUNA_LIST3
#define LACUNA_LISTS88 LACUNA_LISTS64 ", " LACUNA_LIST4 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LACUNA_LISTS96 LACUNA_LISTS64 ", " LACUNA_LIST4 ", " LACUNA_LIST5
#define LACUNA_LISTS128 LACUNA_LISTS96 ", " LACUNA_LIST6 ", " LACUNA_LIST7
#define LACUNA_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LACUNA_SUMS16(i) LACUNA_SUMS4(i), LACUNA_SUMS4(i + 4), LACUNA_SUMS4(i + 8), LACUNA_SUMS4(i + 12)
#define LACUNA_SUMS32 LACUNA_SUMS16(0), LACUNA_SUMS16(16)
#define LACUNA_SUMS64 LACUNA_SUMS32, LACUNA_SUMS16(32), LACUNA_SUMS16(48)
#define LACUNA_SUMS88 LACUNA_SUMS64, LACUNA_SUMS16(64), LACUNA_SUMS4(80), LACUNA_SUMS4(84)
#define LACUNA_SUMS96 LACUNA_SUMS64, LACUNA_SUMS16(64), LACUNA_SUMS16(80)
#define LACUNA_SUMS128 LACUNA_SUMS96, LACUNA_SUMS16(96), LACUNA_SUMS16(112)

/// A step of a product: sums (+)= A [64, 32 stored bytes] B [kTokens, ...]^T, both in shared memory; dense: 32 bytes of
/// each token, 2:4: 64. add false: what the sums held does not count. Sum 4 j + 2 h + e of a thread: row 16 warp + lane
/// / 4 + 8 h of A, token 8 j + 2 (lane % 4) + e. metadata: of the warp's 16 rows, as tensor_core_form.h has it; bf16:
/// kSelector says whose lanes count.
template <bool kEightBits, bool kSparse, int kTokens>
struct Step;

#define LACUNA_DENSE_STEP(eight_bits, tokens, sums, kind, tail, s0, s1, s2)                                         \
  template <>                                                                                                       \
  struct Step<eight_bits, false, tokens> {                                                                          \
    template <int kSelector>                                                                                        \
    static __device__ __forceinline__ void run(float (&d)[sums], uint64_t a, uint64_t b, uint32_t, int add) {       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" s2                                                          \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #tokens kind " {" LACUNA_LISTS##sums "}, %" s0 ", %" s1      \
                                                                                            ", p, 1, 1" tail ";\n}" \
                   : LACUNA_SUMS##sums                                                                              \
                   : "l"(a), "l"(b), "r"(add));                                                                     \
    }                                                                                                               \
  };
#define LACUNA_SPARSE_STEP(eight_bits, tokens, sums, kind, tail, s0, s1, s2, s3, s4)                                   \
  template <>                                                                                                          \
  struct Step<eight_bits, true, tokens> {                                                                              \
    template <int kSelector>                                                                                           \
    static __device__ __forceinline__ void run(float (&d)[sums], uint64_t a, uint64_t b, uint32_t metadata, int add) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" s3                                                             \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sp.sync.aligned.m64n" #tokens kind " {" LACUNA_LISTS##sums                         \
                   "}, %" s0 ", %" s1 ", %" s2 ", %" s4 ", p, 1, 1" tail ";\n}"                                        \
                   : LACUNA_SUMS##sums                                                                                 \
                   : "l"(a), "l"(b), "r"(metadata), "r"(add), "n"(eight_bits ? 0 : kSelector));                        \
    }                                                                                                                  \
  };
#define LACUNA_STEP(tokens, sums, s0, s1, s2, s3, s4)                                 \
  LACUNA_DENSE_STEP(true, tokens, sums, "k32.f32.e4m3.e4m3", "", s0, s1, s2)          \
  LACUNA_DENSE_STEP(false, tokens, sums, "k16.f32.bf16.bf16", ", 0, 0", s0, s1, s2)   \
  LACUNA_SPARSE_STEP(true, tokens, sums, "k64.f32.e4m3.e4m3", "", s0, s1, s2, s3, s4) \
  LACUNA_SPARSE_STEP(false, tokens, sums, "k32.f32.bf16.bf16", ", 0, 0", s0, s1, s2, s3, s4)
LACUNA_STEP(64, 32, "32", "33", "34", "35", "36")
LACUNA_STEP(128, 64, "64", "65", "66", "67", "68")
LACUNA_STEP(176, 88, "88", "89", "90", "91", "92")
LACUNA_STEP(192, 96, "96", "97", "98", "99", "100")
LACUNA_STEP(256, 128, "128", "129", "130", "131", "132")
#undef LACUNA_STEP
#undef LACUNA_DENSE_STEP
#undef LACUNA_SPARSE_STEP

/// sums (+)= A [64, 16] B [16, 128] of bf16, A in registers, as MmaA of each warp's 16 rows; B in shared memory by rows
/// (describe_turned_matrix). add, sums: as Step has them.
__device__ __forceinline__ void multiply_held(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LACUNA_LISTS64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : LACUNA_SUMS64
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

}  // namespace lacuna::cuda
