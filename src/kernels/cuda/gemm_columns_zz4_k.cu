// src/kernels/cuda/gemm_columns_zz4_k.cu - operands of zz4_k columns.
#include "kernels/cuda/gemm_columns.cuh"

namespace lacuna::cuda {
namespace {

struct GemmZz4K {
  static constexpr int kCodeBytes = 128, kHeaderBytes = 16, kGroups = 8;
  using Codes = uint32_t;

  /// Codes are read as 16 + code, a float without a conversion.
  static __device__ __forceinline__ ColumnScale scale(const std::byte* header, int group) {
    const uint4 v = load_stream(reinterpret_cast<const uint4*>(header));
    const uint32_t shift = 8 * (uint32_t(group) % 4);
    const uint32_t a = v.y >> shift, b = v.z >> shift, c = v.w >> shift;
    const uint32_t scale = group < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
    const uint32_t min = group < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
    const float2 d = __half22float2(as_half2(v.x));
    const float s = d.x * float(scale);
    return {s, -d.y * float(min) - 16 * s};
  }
  static __device__ __forceinline__ Codes codes(const std::byte* column, int lane) {
    return reinterpret_cast<const uint32_t*>(column)[lane];
  }
  static __device__ __forceinline__ float weight(Codes word, int i, ColumnScale s) {
    const uint32_t code = 4 * i <= 19 ? word << (19 - 4 * i) : word >> (4 * i - 19);
    return fmaf(__uint_as_float(0x41800000u | (code & 0x780000u)), s.scale, s.offset);
  }
};

}  // namespace

const GemmColumnsKernel* gemm_columns_zz4_k(layout::Id id) {
  return id == layout::Id::zz4_k ? &kGemmColumnsKernel<GemmZz4K> : nullptr;
}

}  // namespace lacuna::cuda
