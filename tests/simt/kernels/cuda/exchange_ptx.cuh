// tests/simt/kernels/cuda/exchange_ptx.cuh - stands in for src/kernels/cuda/exchange_ptx.cuh.
#pragma once

#include <atomic>

#include "simt.h"

namespace lacuna::cuda {

inline void store_words(ulonglong2* to, ulonglong2 v) {
  std::atomic_ref(to->x).store(v.x, std::memory_order_relaxed);
  std::atomic_ref(to->y).store(v.y, std::memory_order_relaxed);
}
inline ulonglong2 load_words(const ulonglong2* from) {
  auto& words = const_cast<ulonglong2&>(*from);
  return {std::atomic_ref(words.x).load(std::memory_order_relaxed),
          std::atomic_ref(words.y).load(std::memory_order_relaxed)};
}
/// Who asks has waited.
inline uint32_t load_flag(const uint32_t* from) {
  simt::wait_for_another_launch();
  return std::atomic_ref(const_cast<uint32_t&>(*from)).load();
}

}  // namespace lacuna::cuda
