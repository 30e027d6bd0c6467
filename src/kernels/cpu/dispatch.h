// src/kernels/cpu/dispatch.h - run-time choice of instruction set.
//
// Files under cpu/isa/ are compiled once per instruction set, everything in them inside namespace
// lacuna::cpu::LACUNA_ISA. A function `f` that they define is declared for all sets by LACUNA_CPU_DECLARE(void f(int))
// and called through LACUNA_CPU_SELECT(f), a pointer chosen once; LACUNA_CPU_SELECT_FOR(isa, f) is that of a given set.
#pragma once

#include <string_view>

namespace lacuna::cpu {

enum class Isa { generic, avx2, avx512, avx512vnni };

/// The best set that this CPU has and this build contains; LACUNA_ISA in the environment forces a lower one (unknown or
/// unsupported: Error that lists them).
Isa isa();
std::string_view isa_name(Isa isa);
/// Whether this CPU and this build have the instruction set.
bool supported(Isa isa);

}  // namespace lacuna::cpu

#if LACUNA_HAVE_AVX2
#define LACUNA_CPU_DECLARE(...) \
  namespace generic {           \
  __VA_ARGS__;                  \
  }                             \
  namespace avx2 {              \
  __VA_ARGS__;                  \
  }                             \
  namespace avx512 {            \
  __VA_ARGS__;                  \
  }                             \
  namespace avx512vnni {        \
  __VA_ARGS__;                  \
  }
#define LACUNA_CPU_SELECT_FOR(isa, f)                                      \
  ((isa) == ::lacuna::cpu::Isa::avx512vnni ? &::lacuna::cpu::avx512vnni::f \
   : (isa) == ::lacuna::cpu::Isa::avx512   ? &::lacuna::cpu::avx512::f     \
   : (isa) == ::lacuna::cpu::Isa::avx2     ? &::lacuna::cpu::avx2::f       \
                                           : &::lacuna::cpu::generic::f)
#else
#define LACUNA_CPU_DECLARE(...) \
  namespace generic {           \
  __VA_ARGS__;                  \
  }
#define LACUNA_CPU_SELECT_FOR(isa, f) (static_cast<void>(isa), &::lacuna::cpu::generic::f)
#endif
#define LACUNA_CPU_SELECT(f) LACUNA_CPU_SELECT_FOR(::lacuna::cpu::isa(), f)
