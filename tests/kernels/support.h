// tests/kernels/support.h - what the kernel tests share.
#pragma once

#include <vector>

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

}  // namespace lacuna::test
