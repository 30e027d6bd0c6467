// src/kernels/cuda/ptx.cuh - one-instruction wrappers of what CUDA C++ has no name for.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

namespace lacuna::cuda {

// Weights are read once: past L1, through the path for data that no kernel in flight writes.
__device__ __forceinline__ uint32_t load_stream(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ uint2 load_stream(const uint2* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ uint4 load_stream(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint32_t load_stream(const uint16_t* from) {
  uint16_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}
__device__ __forceinline__ uint32_t load_stream(const uint8_t* from) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

// Programmatic dependent launch (PTX ISA, griddepcontrol). Before sm_90 kernels start when the one before has ended.
/// Lets the next kernel of the stream start as soon as every block of this one has said so or ended.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Waits until the kernels before have ended and what they wrote can be read.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Waits for `threads` threads, whole warps, at barrier `id` (1 to 15).
__device__ __forceinline__ void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// The block's shared memory whose size the launch gives.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 of_launch[];
  return reinterpret_cast<T*>(of_launch);
}

/// Asks for a cache line in L2.
__device__ __forceinline__ void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/// Asks for `bytes` in L2. from: aligned to 16 bytes; bytes: a multiple of 16.
__device__ __forceinline__ void prefetch_l2(const std::byte* from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#else
  for (uint32_t at = 0; at < bytes; at += 128) prefetch_l2(from + at);
#endif
}

/// *to += v, without an answer. to: aligned to 16 bytes.
__device__ __forceinline__ void reduce_add(float* to, float4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
#else
  atomicAdd(to, v.x), atomicAdd(to + 1, v.y), atomicAdd(to + 2, v.z), atomicAdd(to + 3, v.w);
#endif
}

/// sum plus the products of four bytes each, `a` unsigned, `b` signed or not.
__device__ __forceinline__ int dot_bytes(uint32_t a, int b, int sum) {
  int out;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
  return out;
}
__device__ __forceinline__ uint32_t dot_bytes(uint32_t a, uint32_t b, uint32_t sum) {
  uint32_t out;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
  return out;
}

__device__ __forceinline__ __half2 as_half2(uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ __forceinline__ uint32_t as_bits(__half2 v) { return *reinterpret_cast<uint32_t*>(&v); }

/// g * sigmoid(g).
__device__ __forceinline__ float silu(float g) { return g / (1 + __expf(-g)); }

}  // namespace lacuna::cuda
