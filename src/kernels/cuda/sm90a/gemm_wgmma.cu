// src/kernels/cuda/sm90a/gemm_wgmma.cu - the GEMM with wgmma. A block has 128 tokens by 128 outputs, each of its two
// warpgroups 64 of the tokens; one more warp has the copy engine bring tiles, which lie in memory as wgmma reads them.
#include <algorithm>

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sm90a/wgmma.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kGroups = 2, kThreads = kGroups * 128 + 32, kStages = 6, kStageBytes = 2 * kTileBytes;
constexpr int kTileAlign = 1024;  // of swizzled matrices

__global__ void __launch_bounds__(kThreads, 2) gemm_wgmma(const __grid_constant__ GemmParams p) {
  extern __shared__ std::byte shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  std::byte* const stages = shared + (kTileAlign - shared_address(shared) % kTileAlign) % kTileAlign;
  const int group = int(threadIdx.x) / 128;
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) init_barrier(full + s, 1), init_barrier(empty + s, kGroups);
    fence_barriers();
  }
  __syncthreads();
  wait_for_predecessors();

  // A block takes every gridDim.x-th tile of y; those of the same outputs run side by side, so that their weights come
  // from L2. Stages follow each other across tiles: while one is stored, the next one's come.
  const int m_tiles = (p.M + kTileRows - 1) / kTileRows;
  const int y_tiles = m_tiles * ((p.N + kTileRows - 1) / kTileRows);
  if (group == kGroups) {
    if (threadIdx.x % 32 != 0) return;
    int turn = 0;
    for (int y_tile = int(blockIdx.x); y_tile < y_tiles; y_tile += int(gridDim.x)) {
      const std::byte* x = p.x + int64_t(y_tile % m_tiles) * p.tiles * kTileBytes;
      const std::byte* w = p.w + int64_t(y_tile / m_tiles) * p.tiles * kTileBytes;
      for (int t = 0; t < p.tiles; ++t, ++turn, x += kTileBytes, w += kTileBytes) {
        const int s = turn % kStages;
        if (turn >= kStages) wait_barrier(empty + s, uint32_t(turn / kStages - 1) % 2);
        arrive_expecting(full + s, kStageBytes);
        copy_bulk(stages + s * kStageBytes, x, kTileBytes, full + s);
        copy_bulk(stages + s * kStageBytes + kTileBytes, w, kTileBytes, full + s);
      }
    }
    return;
  }

  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
  const bool tells = threadIdx.x % 128 == 0;
  int turn = 0;
  for (int y_tile = int(blockIdx.x); y_tile < y_tiles; y_tile += int(gridDim.x)) {
    float sums[64] = {};
    for (int t = 0; t < p.tiles; ++t, ++turn) {
      const int s = turn % kStages;
      wait_barrier(full + s, uint32_t(turn / kStages) % 2);
      const std::byte* const x_tile = stages + s * kStageBytes;
      const uint64_t a = describe_matrix(x_tile + group * 64 * kTileRowBytes), b = describe_matrix(x_tile + kTileBytes);
      begin_products();
#pragma unroll
      for (int step = 0; step < kTileColumns / 16; ++step) multiply_64x128(sums, a + 2 * step, b + 2 * step);
      commit_products();
      wait_for_products<1>();  // those of the stage before are done
      if (t > 0 && tells) arrive(empty + (turn - 1) % kStages);
    }
    wait_for_products<0>();
    if (tells) arrive(empty + (turn - 1) % kStages);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = y_tile % m_tiles * kTileRows + group * 64 + 16 * warp + 8 * half + lane / 4;
      if (m < p.M)
        store_row<16>(p, m, y_tile / m_tiles * kTileRows + lane % 4 * 2,
                      [&](int j) { return make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]); });
    }
  }
}

}  // namespace

void launch_gemm_wgmma(const Device& device, Stream& stream, const GemmParams& params) {
  constexpr int64_t kShared = kStages * kStageBytes + kTileAlign;
  check_cuda(cudaFuncSetAttribute(gemm_wgmma, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kShared)));
  const int64_t tiles = int64_t{(params.M + kTileRows - 1) / kTileRows} * ((params.N + kTileRows - 1) / kTileRows);
  const dim3 blocks(unsigned(std::min<int64_t>(tiles, device.info().multiprocessors)));
  launch_kernel(device, stream, gemm_wgmma, {blocks, kThreads, kShared}, params);
}

}  // namespace lacuna::cuda
