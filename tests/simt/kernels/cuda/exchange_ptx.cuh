// tests/simt/kernels/cuda/exchange_ptx.cuh - stands in for src/kernels/cuda/exchange_ptx.cuh.
#pragma once

#include "simt.h"

namespace lacuna::cuda {

inline void store_words(ulonglong2* to, ulonglong2 v) { *to = v; }
inline ulonglong2 load_words(const ulonglong2* from) { return *from; }
inline uint32_t load_flag(const uint32_t* from) { return *from; }

}  // namespace lacuna::cuda
