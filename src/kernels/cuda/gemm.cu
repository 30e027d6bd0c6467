// src/kernels/cuda/gemm.cu - operands of activations, and the choice of a GEMM kernel.
#include "core/error.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_block.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kInputThreads = 256;

/// Columns k to k + 7 of a token; zeros from K on.
__device__ __forceinline__ void load_inputs(const GemmInputs& a, int64_t at, int64_t k, bool aligned, float v[8]) {
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    load4(a.x + at, k + half, a.to.K, aligned, v + half);
    if (a.gate == Gate::swiglu) {
      float up[4];
      load4(a.up + at, k + half, a.to.K, aligned, up);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[half + i] = silu(v[half + i]) * up[i];
    }
    if (a.gate == Gate::relu) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[half + i] = v[half + i] < 0 ? 0.0f : v[half + i];
    }
  }
}

/// One block a token: the largest magnitude, then the values.
__global__ void __launch_bounds__(kInputThreads) write_inputs(const __grid_constant__ GemmInputs a) {
  __shared__ uint32_t of_warp[kInputThreads / 32];
  launch_dependents();
  wait_for_predecessors();
  const int64_t m = blockIdx.x, at = m * a.stride, tiles = (a.to.K + kTileColumns - 1) / kTileColumns;
  const bool aligned = a.stride % 4 == 0;
  uint32_t largest = 0;
  for (int64_t k = threadIdx.x * 8; k < a.to.K; k += kInputThreads * 8) {
    float v[8];
    load_inputs(a, at, k, aligned, v);
#pragma unroll
    for (const float value : v) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (const uint32_t other : of_warp) largest = max(largest, other);
  const float scale = scale_of(largest), inverse = inverse_of(scale);
  if (threadIdx.x == 0) a.to.scale[m] = scale;
  for (int64_t k = threadIdx.x * 8; k < tiles * kTileColumns; k += kInputThreads * 8) {
    float v[8];
    load_inputs(a, at, k, aligned, v);
    *reinterpret_cast<uint4*>(a.to.tiles + operand_place(m, k / 8, tiles)) =
        make_uint4(pack_halves(v[0] * inverse, v[1] * inverse), pack_halves(v[2] * inverse, v[3] * inverse),
                   pack_halves(v[4] * inverse, v[5] * inverse), pack_halves(v[6] * inverse, v[7] * inverse));
  }
}

}  // namespace

int64_t operand_bytes(int64_t rows, int64_t K) {
  return (rows + kTileRows - 1) / kTileRows * tiles_of_row(K) * kTileBytes;
}

void launch_gemm_inputs(const Device& device, Stream& stream, const GemmInputs& args) {
  if (args.to.rows > 0)
    launch_kernel(device, stream, write_inputs, {dim3(unsigned(args.to.rows)), kInputThreads}, args);
}

void launch_gemm(const Device& device, Stream& stream, const GemmArgs& args) {
  if (args.x.rows <= 0 || args.w.rows <= 0) return;
  if (args.x.K != args.w.K) throw Error("inputs of {} columns do not fit weights of {}", args.x.K, args.w.K);
  GemmParams p{};
  p.x = args.x.tiles, p.w = args.w.tiles;
  p.x_scale = args.x.scale, p.w_scale = args.w.scale, p.bias = args.bias;
  p.y = args.y, p.stride = args.stride, p.add = args.add;
  p.pairs = args.stride % 2 == 0 && reinterpret_cast<uintptr_t>(args.y) % sizeof(float2) == 0;
  p.M = int(args.x.rows), p.N = int(args.w.rows), p.tiles = int(tiles_of_row(args.x.K));
#if LACUNA_HAVE_SM90A
  const bool has_wgmma = device.info().major == 9;
#else
  const bool has_wgmma = false;
#endif
  if (args.kernel == GemmKernel::wgmma && !has_wgmma)
    throw Error("{} (compute capability {}.{}) does not run the wgmma kernel, which this build may not have",
                device.info().name, device.info().major, device.info().minor);
#if LACUNA_HAVE_SM90A
  if (has_wgmma && args.kernel != GemmKernel::mma) return launch_gemm_wgmma(device, stream, p);
#endif
  launch_gemm_mma(device, stream, p);
}

}  // namespace lacuna::cuda
