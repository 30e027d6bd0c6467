// tests/simt/kernels/cuda/ptx.cuh - stands in for src/kernels/cuda/ptx.cuh.
#pragma once

#include "simt.h"

namespace lacuna::cuda {

inline uint32_t load_stream(const uint32_t* from) { return *from; }
inline uint2 load_stream(const uint2* from) { return *from; }
inline uint4 load_stream(const uint4* from) { return *from; }
inline uint32_t load_stream(const uint16_t* from) { return *from; }
inline uint32_t load_stream(const uint8_t* from) { return *from; }
inline void launch_dependents() {}
inline void wait_for_predecessors() {}
/// Calls of prefetch_l2().
struct Asked {
  const std::byte* from;
  uint32_t bytes;
};
inline std::vector<Asked> asked_for;
inline void prefetch_l2(const std::byte* from, uint32_t bytes) { asked_for.push_back({from, bytes}); }
inline void prefetch_l2(const void*) {}
inline void sync_threads(int id, int threads) { simt::sync_named(unsigned(id), unsigned(threads)); }
template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(simt::dynamic_shared());
}
inline void reduce_add(float* to, float4 v) { to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w; }
inline int dot_bytes(uint32_t a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += int(a >> (8 * i) & 255) * int(int8_t(uint32_t(b) >> (8 * i) & 255));
  return sum;
}
inline uint32_t dot_bytes(uint32_t a, uint32_t b, uint32_t sum) {
  for (int i = 0; i < 4; ++i) sum += (a >> (8 * i) & 255) * (b >> (8 * i) & 255);
  return sum;
}
inline __half2 as_half2(uint32_t bits) { return lacuna_bits_as<__half2>(bits); }
inline uint32_t as_bits(__half2 v) { return lacuna_bits_as<uint32_t>(v); }
inline float silu(float g) { return g / (1 + std::exp(-g)); }

}  // namespace lacuna::cuda
