// src/kernels/cpu/active_isa.h - what collecting active inputs needs of each instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/dispatch.h"

namespace lacuna::cpu {

struct ActiveArgs {
  const float* x = nullptr;  // [M, K]
  int64_t M = 0, K = 0;
  const float* norms = nullptr;  // [K] or nullptr
  float t = 0;
  int64_t begin = 0, end = 0;  // of the inputs
};

/// The number of active inputs in [begin, end).
LACUNA_CPU_DECLARE(int64_t count_active(const ActiveArgs& a))
/// Writes their indices and nothing else to out; returns their number.
LACUNA_CPU_DECLARE(int64_t write_active(const ActiveArgs& a, int32_t* out))

}  // namespace lacuna::cpu
