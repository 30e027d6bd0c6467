// src/kernels/cuda/exchange_ptx.cuh - one-instruction wrappers of accesses to memory that several devices, or a device
// and the host, use at the same time.
#pragma once

#include <cstdint>

namespace lacuna::cuda {

// Each of the two words is read and written as a whole (PTX ISA, "Memory Consistency Model": vectors are accesses to
// their elements), past L1; nothing is ordered. Aligned to 16 bytes.
__device__ __forceinline__ void store_words(ulonglong2* to, ulonglong2 v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(v.x), "l"(v.y) : "memory");
}
__device__ __forceinline__ ulonglong2 load_words(const ulonglong2* from) {
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
  return v;
}
/// Of the host's memory.
__device__ __forceinline__ uint32_t load_flag(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

}  // namespace lacuna::cuda
