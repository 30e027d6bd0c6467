// src/kernels/cuda/gemm_columns_layouts.cu - operands of every zigzag layout (prepared.h has the places of their bits).
#include "kernels/cuda/gemm_columns.cuh"

namespace lacuna::cuda {
namespace {

/// A code of kBits bits becomes the float 2^kBits + code without a conversion; kZero: the code of a weight of zero.
template <int kBits, int kZero = 0>
struct Coded {
  static __device__ __forceinline__ ColumnScale of(float scale, float offset = 0) {
    return {scale, offset - float((1 << kBits) + kZero) * scale};
  }
  static __device__ __forceinline__ float weight(uint32_t code, ColumnScale s) {
    return fmaf(__uint_as_float(uint32_t(127 + kBits) << 23 | code << (23 - kBits)), s.scale, s.offset);
  }
};

__device__ __forceinline__ uint32_t header_word(const std::byte* header, int i) {
  return reinterpret_cast<const uint32_t*>(header)[i];
}
/// Byte g of the header.
__device__ __forceinline__ uint32_t header_byte(const std::byte* header, int g) { return uint32_t(header[g]); }
template <class T>
__device__ __forceinline__ T code_at(const std::byte* column, int offset) {
  return *reinterpret_cast<const T*>(column + offset);
}

/// d, dmin and eight 6-bit scales and mins (layout/six_bit.h).
template <class Code>
__device__ __forceinline__ ColumnScale six_bit_scale(const std::byte* header, int group) {
  const uint4 v = *reinterpret_cast<const uint4*>(header);
  const uint32_t shift = 8 * (uint32_t(group) % 4);
  const uint32_t a = v.y >> shift, b = v.z >> shift, c = v.w >> shift;
  const uint32_t scale = group < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
  const uint32_t min = group < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
  const float2 d = __half22float2(as_half2(v.x));
  return Code::of(d.x * float(scale), -d.y * float(min));
}

struct Zz2K {
  static constexpr int kCodeBytes = 64, kHeaderBytes = 20, kGroups = 16;
  using Codes = uint32_t;
  using Code = Coded<2>;
  static __device__ __forceinline__ ColumnScale scale(const std::byte* header, int group) {
    const float2 d = __half22float2(as_half2(header_word(header, 4)));
    const uint32_t both = header_byte(header, group);
    return Code::of(d.x * float(both & 15), -d.y * float(both >> 4));
  }
  static __device__ __forceinline__ Codes codes(const std::byte* column, int lane) {
    return code_at<uint16_t>(column, 2 * lane);
  }
  static __device__ __forceinline__ float weight(Codes v, int i, ColumnScale s) {
    return Code::weight(v >> (2 * i) & 3, s);
  }
};

struct Zz3K {
  static constexpr int kCodeBytes = 96, kHeaderBytes = 16, kGroups = 16;
  struct Codes {
    uint32_t low, high;
  };
  using Code = Coded<3, 4>;
  static __device__ __forceinline__ ColumnScale scale(const std::byte* header, int group) {
    const uint32_t low = header_byte(header, group % 8) >> (group / 8 * 4) & 15;
    const uint32_t high = header_byte(header, 8 + group % 4) >> (group / 4 * 2) & 3;
    return Code::of(__low2float(as_half2(header_word(header, 3))) * float(int(low | high << 4) - 32));
  }
  static __device__ __forceinline__ Codes codes(const std::byte* column, int lane) {
    return {code_at<uint16_t>(column, 2 * lane), code_at<uint8_t>(column, 64 + lane)};
  }
  static __device__ __forceinline__ float weight(Codes v, int i, ColumnScale s) {
    const int p = i % 4, half = i / 4;
    const uint32_t low = v.low >> (8 * half), high = v.high >> (4 * half);
    const uint32_t split = (low >> 6 & 3) | (high >> 3 & 1) << 2;  // of p = 2
    return Code::weight(p < 2 ? low >> (3 * p) & 7 : p == 2 ? split : high & 7, s);
  }
};

struct Zz4K {
  static constexpr int kCodeBytes = 128, kHeaderBytes = 16, kGroups = 8;
  using Codes = uint32_t;
  using Code = Coded<4>;
  static __device__ __forceinline__ ColumnScale scale(const std::byte* header, int group) {
    return six_bit_scale<Code>(header, group);
  }
  static __device__ __forceinline__ Codes codes(const std::byte* column, int lane) {
    return code_at<uint32_t>(column, 4 * lane);
  }
  static __device__ __forceinline__ float weight(Codes v, int i, ColumnScale s) {
    return Code::weight(v >> (4 * i) & 15, s);
  }
};

struct Zz5K {
  static constexpr int kCodeBytes = 160, kHeaderBytes = 16, kGroups = 8;
  struct Codes {
    uint32_t low, high;
  };
  using Code = Coded<5>;
  static __device__ __forceinline__ ColumnScale scale(const std::byte* header, int group) {
    return six_bit_scale<Code>(header, group);
  }
  static __device__ __forceinline__ Codes codes(const std::byte* column, int lane) {
    return {code_at<uint32_t>(column, 4 * lane), code_at<uint8_t>(column, 128 + lane)};
  }
  static __device__ __forceinline__ float weight(Codes v, int i, ColumnScale s) {
    const int p = i % 4, half = i / 4;
    const uint32_t low = v.low >> (16 * half), high = v.high >> (4 * half);
    return Code::weight(p < 3 ? low >> (5 * p) & 31 : (high & 15) | (low >> 15 & 1) << 4, s);
  }
};

struct Zz6K {
  static constexpr int kCodeBytes = 192, kHeaderBytes = 20, kGroups = 16;
  struct Codes {
    uint32_t low, high;
  };
  using Code = Coded<6, 32>;
  static __device__ __forceinline__ ColumnScale scale(const std::byte* header, int group) {
    return Code::of(__low2float(as_half2(header_word(header, 4))) * float(int8_t(header_byte(header, group))));
  }
  static __device__ __forceinline__ Codes codes(const std::byte* column, int lane) {
    return {code_at<uint32_t>(column, 4 * lane), code_at<uint16_t>(column, 128 + 2 * lane)};
  }
  static __device__ __forceinline__ float weight(Codes v, int i, ColumnScale s) {
    const int p = i % 4, half = i / 4;
    const uint32_t low = v.low >> (16 * half), high = v.high >> (8 * half);
    const uint32_t split = (high & 3) | (low >> 12 & 15) << 2;  // of p = 2
    return Code::weight(p < 2 ? low >> (6 * p) & 63 : p == 2 ? split : high >> 2 & 63, s);
  }
};

struct Zz8 {
  static constexpr int kCodeBytes = 256, kHeaderBytes = 16, kGroups = 8;
  using Codes = uint2;
  using Code = Coded<8, 128>;
  static __device__ __forceinline__ ColumnScale scale(const std::byte* header, int group) {
    const float2 pair = __half22float2(as_half2(header_word(header, group / 2)));
    return Code::of(group % 2 == 0 ? pair.x : pair.y);
  }
  static __device__ __forceinline__ Codes codes(const std::byte* column, int lane) {
    return code_at<uint2>(column, 8 * lane);
  }
  static __device__ __forceinline__ float weight(Codes v, int i, ColumnScale s) {
    return Code::weight((i % 4 < 2 ? v.x : v.y) >> (8 * (i % 2 + i / 4 * 2)) & 255, s);
  }
};

}  // namespace

const GemmColumnsKernel* gemm_columns_kernel(layout::Id id) {
  switch (id) {
    case layout::Id::zz2_k:
      return &kGemmColumnsKernel<Zz2K>;
    case layout::Id::zz3_k:
      return &kGemmColumnsKernel<Zz3K>;
    case layout::Id::zz4_k:
      return &kGemmColumnsKernel<Zz4K>;
    case layout::Id::zz5_k:
      return &kGemmColumnsKernel<Zz5K>;
    case layout::Id::zz6_k:
      return &kGemmColumnsKernel<Zz6K>;
    case layout::Id::zz8:
      return &kGemmColumnsKernel<Zz8>;
    default:
      return nullptr;
  }
}

}  // namespace lacuna::cuda
