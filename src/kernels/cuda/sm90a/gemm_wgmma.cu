// src/kernels/cuda/sm90a/gemm_wgmma.cu - the GEMM with wgmma. A block has 128 tokens by 128 outputs, each of its two
// warpgroups 64 of the tokens; one more warp has the copy engine bring tiles, which lie in memory as wgmma reads them.
// Blocks of a cluster have different tokens and the same outputs: each brings a share of the weights to all of them,
// which leaves more of L2 to what runs beside (a 7B model's prompt of 512 tokens: 21.4 instead of 23.2 ms on an H200).
#include <algorithm>

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sm90a/wgmma.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kGroups = 2, kThreads = kGroups * 128 + 32, kStages = 6, kStageBytes = 2 * kTileBytes;
constexpr int kTileAlign = 1024;  // of swizzled matrices

// One block a multiprocessor; half of the registers are left to kernels beside it.
template <int kCluster>
__global__ void __launch_bounds__(kThreads, 2) gemm_wgmma(const __grid_constant__ GemmParams p) {
  extern __shared__ std::byte shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  std::byte* const stages = shared + (kTileAlign - shared_address(shared) % kTileAlign) % kTileAlign;
  const int group = int(threadIdx.x) / 128;
  launch_dependents();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) init_barrier(full + s, 1), init_barrier(empty + s, kGroups * kCluster);
    fence_barriers();
  }
  if constexpr (kCluster > 1)
    synchronize_cluster();
  else
    __syncthreads();
  wait_for_predecessors();

  // A block takes every gridDim.x-th tile of y; those of the same outputs run side by side, so that their weights come
  // from L2. Stages follow each other across tiles: while one is stored, the next one's come.
  const int m_tiles = (p.M + kTileRows - 1) / kTileRows;
  const int y_tiles = m_tiles * ((p.N + kTileRows - 1) / kTileRows);
  if (group == kGroups && threadIdx.x % 32 == 0) {
    constexpr int kShare = kTileBytes / kCluster;
    const int share = int(blockIdx.x) % kCluster * kShare;
    int turn = 0;
    for (int y_tile = int(blockIdx.x); y_tile < y_tiles; y_tile += int(gridDim.x)) {
      const std::byte* x = p.x + int64_t(y_tile % m_tiles) * p.tiles * kTileBytes;
      const std::byte* w = p.w + int64_t(y_tile / m_tiles) * p.tiles * kTileBytes;
      for (int t = 0; t < p.tiles; ++t, ++turn, x += kTileBytes, w += kTileBytes) {
        const int s = turn % kStages;
        if (turn >= kStages) wait_barrier(empty + s, uint32_t(turn / kStages - 1) % 2);
        arrive_expecting(full + s, kStageBytes);
        copy_bulk(stages + s * kStageBytes, x, kTileBytes, full + s);
        std::byte* const to = stages + s * kStageBytes + kTileBytes + share;
        if constexpr (kCluster > 1)
          copy_bulk_to_all(to, w + share, kShare, full + s, (1 << kCluster) - 1);
        else
          copy_bulk(to, w, kShare, full + s);
      }
    }
  }

  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) % 128 / 32;
  const auto release = [&](int s) {  // every block of the cluster writes to this one
    if (threadIdx.x % 128 >= kCluster) return;
    if constexpr (kCluster > 1)
      arrive_at(empty + s, threadIdx.x % 128);
    else
      arrive(empty + s);
  };
  int turn = 0;
  for (int y_tile = int(blockIdx.x); group < kGroups && y_tile < y_tiles; y_tile += int(gridDim.x)) {
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
      if (t > 0) release((turn - 1) % kStages);
    }
    wait_for_products<0>();
    release((turn - 1) % kStages);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int m = y_tile % m_tiles * kTileRows + group * 64 + 16 * warp + 8 * half + lane / 4;
      if (m < p.M)
        store_row<16>(p, m, y_tile / m_tiles * kTileRows + lane % 4 * 2,
                      [&](int j) { return make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]); });
    }
  }
  if constexpr (kCluster > 1) synchronize_cluster();  // none leaves while another writes to it
}

template <int kCluster>
void launch(const Device& device, Stream& stream, const GemmParams& params, int64_t tiles) {
  constexpr int64_t kShared = kStages * kStageBytes + kTileAlign;
  const auto kernel = gemm_wgmma<kCluster>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kShared)));
  const int64_t blocks = std::min<int64_t>(tiles, device.info().multiprocessors / kCluster * kCluster);
  launch_kernel(device, stream, kernel, {dim3(unsigned(blocks)), kThreads, kShared, kCluster}, params);
}

}  // namespace

void launch_gemm_wgmma(const Device& device, Stream& stream, const GemmParams& params) {
  const int m_tiles = (params.M + kTileRows - 1) / kTileRows;
  const int64_t tiles = int64_t{m_tiles} * ((params.N + kTileRows - 1) / kTileRows);
  if (m_tiles % 2 == 0)
    launch<2>(device, stream, params, tiles);
  else
    launch<1>(device, stream, params, tiles);
}

}  // namespace lacuna::cuda
