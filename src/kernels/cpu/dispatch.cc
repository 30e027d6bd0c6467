#include "kernels/cpu/dispatch.h"

#include <array>
#include <cstdlib>

#include "core/error.h"

namespace lacuna::cpu {

bool supported(Isa isa) {
#if LACUNA_HAVE_AVX2
  // __builtin_cpu_supports also checks that the operating system saves the wide registers.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  switch (isa) {
    case Isa::generic:
      return true;
    case Isa::avx2:
      return avx2;
    case Isa::avx512:
      return avx512;
    case Isa::avx512vnni:
      return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
             __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg") &&
             __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512ifma") &&
             __builtin_cpu_supports("gfni") && __builtin_cpu_supports("vpclmulqdq");
  }
  return false;
#else
  return isa == Isa::generic;
#endif
}

namespace {

constexpr std::array kAll = {Isa::avx512vnni, Isa::avx512, Isa::avx2, Isa::generic};

Isa choose() {
  const char* forced = std::getenv("LACUNA_ISA");
  for (const Isa isa : kAll) {
    if (!supported(isa)) continue;
    if (forced == nullptr || isa_name(isa) == forced) return isa;
  }
  throw Error(
      "LACUNA_ISA={}: this CPU or build has no such instruction set; unset it or use generic, avx2, avx512 or "
      "avx512vnni",
      forced);
}

}  // namespace

std::string_view isa_name(Isa isa) {
  constexpr std::array<std::string_view, 4> names = {"generic", "avx2", "avx512", "avx512vnni"};
  return names[size_t(isa)];
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace lacuna::cpu
