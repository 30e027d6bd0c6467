// src/kernels/cuda/gemm_mma.cu - the GEMM with mma.sync, for compute capability 8.0 and later. A block has 128 tokens
// by 128 outputs, a warp 64 by 32 of them; tiles come through a ring of stages in shared memory.
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256, kStages = 3, kStageBytes = 2 * kTileBytes;
constexpr int kWarpRows = 64, kWarpColumns = 32, kWarpsAlongN = kTileRows / kWarpColumns;

/// Every thread copies its pieces of both tiles.
__device__ __forceinline__ void load_tile(std::byte* stage, const std::byte* x, const std::byte* w) {
#pragma unroll
  for (int i = 0; i < kTileBytes / 16 / kThreads; ++i) {
    const int at = (i * kThreads + int(threadIdx.x)) * 16;
    copy_async(stage + at, x + at);
    copy_async(stage + kTileBytes + at, w + at);
  }
}

__global__ void __launch_bounds__(kThreads, 1) gemm_mma(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(128) std::byte stages[];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const int row0 = warp / kWarpsAlongN * kWarpRows, column0 = warp % kWarpsAlongN * kWarpColumns;
  const std::byte* const x = p.x + int64_t(blockIdx.x) * p.tiles * kTileBytes;
  const std::byte* const w = p.w + int64_t(blockIdx.y) * p.tiles * kTileBytes;
  launch_dependents();
  wait_for_predecessors();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < p.tiles) load_tile(stages + s * kStageBytes, x + int64_t(s) * kTileBytes, w + int64_t(s) * kTileBytes);
    commit_copies();
  }
  float sums[kWarpRows / 16][kWarpColumns / 8][4] = {};
  for (int t = 0; t < p.tiles; ++t) {
    wait_for_copies<kStages - 2>();
    __syncthreads();  // the tile is here, and nobody reads the one before it
    const int next = t + kStages - 1;
    if (next < p.tiles)
      load_tile(stages + next % kStages * kStageBytes, x + int64_t(next) * kTileBytes, w + int64_t(next) * kTileBytes);
    commit_copies();
    const std::byte* const x_tile = stages + t % kStages * kStageBytes;
    const std::byte* const w_tile = x_tile + kTileBytes;
#pragma unroll
    for (int step = 0; step < kTileColumns / 16; ++step) {
      MmaA a[kWarpRows / 16];
      MmaB b[kWarpColumns / 8];
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i)
        a[i] = load_a(x_tile + tile_place(row0 + 16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int j = 0; j < kWarpColumns / 16; ++j)
        load_b(w_tile + tile_place(column0 + 16 * j + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2), b[2 * j],
               b[2 * j + 1]);
#pragma unroll
      for (int i = 0; i < kWarpRows / 16; ++i)
#pragma unroll
        for (int j = 0; j < kWarpColumns / 8; ++j) multiply(sums[i][j], a[i], b[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < kWarpRows / 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = int(blockIdx.x) * kTileRows + row0 + 16 * i + 8 * half + lane / 4;
      if (m >= p.M) continue;
      store_row<kWarpColumns / 8>(p, m, int(blockIdx.y) * kTileRows + column0 + lane % 4 * 2,
                                  [&](int j) { return make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]); });
    }
}

}  // namespace

void launch_gemm_mma(const Device& device, Stream& stream, const GemmParams& params) {
  constexpr int64_t kShared = kStages * kStageBytes;
  check_cuda(cudaFuncSetAttribute(gemm_mma, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kShared)));
  const dim3 blocks(unsigned(params.M + kTileRows - 1) / kTileRows, unsigned(params.N + kTileRows - 1) / kTileRows);
  launch_kernel(device, stream, gemm_mma, {blocks, kThreads, kShared}, params);
}

}  // namespace lacuna::cuda
