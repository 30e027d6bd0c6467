// src/kernels/cuda/share.h - the even split of a list over workers, for host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LACUNA_HOST_DEVICE __host__ __device__
#else
#define LACUNA_HOST_DEVICE
#endif

namespace lacuna::cuda {

/// 2^32 / parts, rounded up: what share_begin() multiplies with instead of dividing. parts >= 2.
LACUNA_HOST_DEVICE constexpr uint32_t share_factor(uint32_t parts) {
  return uint32_t(((uint64_t{1} << 32) + parts - 1) / parts);
}

/// First element of part i of `parts`; part i ends where the next one begins. Exactly floor(count * i / parts) while
/// count * i * parts < 2^32, else at most one more: parts differ by at most two elements. count * i < 2^32.
LACUNA_HOST_DEVICE inline uint32_t share_begin(uint32_t count, uint32_t i, uint32_t parts, uint32_t factor) {
  if (i >= parts) return count;
  return uint32_t(uint64_t{count * i} * factor >> 32);
}

}  // namespace lacuna::cuda
