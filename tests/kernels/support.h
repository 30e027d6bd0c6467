// tests/kernels/support.h - what the kernel tests share.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/rng.h"
#include "core/thread_pool.h"
#include "kernels/cpu/dispatch.h"

namespace lacuna::test {

/// The instruction sets that this machine has.
inline std::vector<cpu::Isa> isas() {
  using cpu::Isa;
  std::vector<Isa> out;
  for (const Isa isa : {Isa::generic, Isa::avx2, Isa::avx512, Isa::avx512vnni})
    if (cpu::supported(isa)) out.push_back(isa);
  return out;
}

inline ThreadPool& pool() {
  static ThreadPool two(2);
  return two;
}

/// [M, K], of sizes that differ widely.
inline std::vector<float> random_inputs(int64_t M, int64_t K, uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(size_t(M * K));
  for (float& value : x) value = float(rng.normal() * std::exp(rng.normal()));
  return x;
}

}  // namespace lacuna::test
