// src/kernels/cpu/isa/ops_simd.h - vector helpers shared by the ops: loads of every cache type, exp, reductions.
// Included only by isa/ops_*.cc; everything is in the instruction set's namespace.
#pragma once

// Highway asks for AES in its AVX2 set; nothing here needs it.
#ifndef HWY_DISABLE_PCLMUL_AES
#define HWY_DISABLE_PCLMUL_AES
#endif
#include <hwy/highway.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/scalar.h"
#include "kernels/ops.h"

namespace lacuna::cpu::LACUNA_ISA {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using Vf = hn::Vec<F32>;
/// Floats of one vector; at most 16.
constexpr int64_t kLanes = int64_t(HWY_LANES(float));

inline Vf load_f16(const f16* p) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4
  // Without conversion instructions Highway loses infinities.
  alignas(64) float values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) values[i] = to_float(p[i]);
  return hn::Load(F32(), values);
#else
  const hn::Rebind<hwy::float16_t, F32> d16;
  return hn::PromoteTo(F32(), hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
#endif
}

inline void store_f16(Vf v, f16* p) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_SSSE3 || HWY_TARGET == HWY_SSE4
  alignas(64) float values[kLanes];
  hn::Store(v, F32(), values);
  for (int64_t i = 0; i < kLanes; ++i) p[i] = to_f16(values[i]);
#else
  const hn::Rebind<hwy::float16_t, F32> d16;
  hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#endif
}

/// exp(x), relative error below 2^-22.5 (1.5 units in the last place; tested) for x in [-87.3, 88.3]; smaller x give 0,
/// larger ones exp(88.3), NaN gives NaN. x = n ln 2 + r, |r| <= ln 2 / 2, Taylor polynomial of degree 7 in r (its
/// remainder, r^8/8!, is below 2^-27).
inline Vf exp(Vf x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const Vf lowest = hn::Set(d, -87.3365447f);
  // Written so that NaN passes: x86 max and min return their second argument then.
  const Vf limited = hn::Min(hn::Set(d, 88.3762626f), hn::Max(lowest, x));
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits.
  const Vf magic = hn::Set(d, 12582912.0f);
  const Vf shifted = hn::MulAdd(limited, hn::Set(d, 1.44269504f), magic);
  const Vf n = hn::Sub(shifted, magic);
  // ln 2 in two parts, the first with 11 trailing zero bits, so that n * high is exact.
  Vf r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), limited);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  Vf p = hn::Set(d, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, 127 << 23));
  const Vf y = hn::IfThenZeroElse(hn::Lt(x, lowest), hn::Mul(p, hn::BitCast(d, power)));
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::IsNaN(x), x, y);
#else
  return y;
#endif
}

/// Defined in ops_elementwise.cc; see ops_isa.h.
void kv_decode(kernels::KvType type, const void* in, int64_t head_dim, float* out);

inline float sum(Vf v) { return hn::GetLane(hn::SumOfLanes(F32(), v)); }
inline float max(Vf v) { return hn::GetLane(hn::MaxOfLanes(F32(), v)); }

}  // namespace lacuna::cpu::LACUNA_ISA
