// src/kernels/cuda/gemm.cu - operands of activations, and the choice of a GEMM kernel.
#include "core/error.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_block.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kInputThreads = 512;

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

/// One block a token, all of it in registers: kPieces times 8 columns a thread.
template <int kPieces>
__global__ void __launch_bounds__(kInputThreads) write_inputs(const __grid_constant__ GemmInputs a) {
  __shared__ SumStorage sums[2];
  __shared__ uint32_t of_warp[kMostBlockWarps];
  launch_dependents();
  wait_for_predecessors();
  const int64_t m = blockIdx.x, tiles = (a.to.K + kTileColumns - 1) / kTileColumns;
  const bool aligned = a.stride % 4 == 0;
  const auto column = [](int r) { return (int64_t(r) * blockDim.x + threadIdx.x) * 8; };
  float v[kPieces][8];
#pragma unroll
  for (int r = 0; r < kPieces; ++r) load_inputs(a, m * a.stride, column(r), aligned, v[r]);

  if (a.norm != nullptr) {
    float mean = 0, squares = 0;
    if (a.norm_bias != nullptr) {
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kPieces; ++r)
        sum += ((v[r][0] + v[r][1]) + (v[r][2] + v[r][3])) + ((v[r][4] + v[r][5]) + (v[r][6] + v[r][7]));
      mean = cluster_sum(sum, sums[0]) / float(a.to.K);
    }
#pragma unroll
    for (int r = 0; r < kPieces; ++r)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column(r) + i < a.to.K) v[r][i] -= mean;
        squares = fmaf(v[r][i], v[r][i], squares);
      }
    const float inverse = 1 / sqrtf(cluster_sum(squares, sums[1]) / float(a.to.K) + a.eps);
#pragma unroll
    for (int r = 0; r < kPieces; ++r)
#pragma unroll
      for (int half = 0; half < 8; half += 4) {
        float weight[4], bias[4] = {};
        load4(a.norm, column(r) + half, a.to.K, true, weight);
        if (a.norm_bias != nullptr) load4(a.norm_bias, column(r) + half, a.to.K, true, bias);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[r][half + i] = v[r][half + i] * inverse * weight[i] + bias[i];
      }
  }

  uint32_t largest = 0;
#pragma unroll
  for (int r = 0; r < kPieces; ++r)
#pragma unroll
    for (const float value : v[r]) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  largest = __reduce_max_sync(~0u, threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0);
  const float scale = scale_of(largest), inverse = inverse_of(scale);
  if (threadIdx.x == 0) a.to.scale[m] = scale;
#pragma unroll
  for (int r = 0; r < kPieces; ++r) {
    if (column(r) >= tiles * kTileColumns) break;
    *reinterpret_cast<uint4*>(a.to.tiles + operand_place(m, column(r) / 8, tiles)) = make_uint4(
        pack_halves(v[r][0] * inverse, v[r][1] * inverse), pack_halves(v[r][2] * inverse, v[r][3] * inverse),
        pack_halves(v[r][4] * inverse, v[r][5] * inverse), pack_halves(v[r][6] * inverse, v[r][7] * inverse));
  }
}

}  // namespace

int64_t operand_bytes(int64_t rows, int64_t K) {
  return (rows + kTileRows - 1) / kTileRows * tiles_of_row(K) * kTileBytes;
}

void launch_gemm_inputs(const Device& device, Stream& stream, const GemmInputs& args) {
  if (args.to.rows <= 0) return;
  const int64_t pieces = tiles_of_row(args.to.K) * (kTileColumns / 8);
  constexpr int64_t kMostPieces = kInputThreads * 16;
  if (pieces > kMostPieces)
    throw Error("--device cuda: {} inputs of a token; the kernels of several tokens take at most {}", args.to.K,
                kMostPieces * 8);
  const auto launch = [&](auto kernel, int64_t of_thread) {
    const auto threads = int((pieces + 32 * of_thread - 1) / (32 * of_thread) * 32);
    launch_kernel(device, stream, kernel, {dim3(unsigned(args.to.rows)), threads}, args);
  };
  if (pieces <= kInputThreads / 2)
    launch(write_inputs<1>, 1);
  else if (pieces <= kInputThreads * 2)
    launch(write_inputs<2>, 2);
  else if (pieces <= kInputThreads * 4)
    launch(write_inputs<4>, 4);
  else if (pieces <= kInputThreads * 8)
    launch(write_inputs<8>, 8);
  else
    launch(write_inputs<16>, 16);
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
