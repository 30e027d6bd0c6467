#include <algorithm>
#include <atomic>

#include "kernels/cuda/exchange.cuh"
#include "kernels/cuda/exchange.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace lacuna::cuda {
namespace {

static_assert(kExchangeThreads >= kExchangeBlocks);  // keep_number()

// A block waits for nothing but the same block of the others, which sends before it waits. All blocks are resident at
// once: a multiprocessor holds four at least, 16 all of them.
__global__ void __launch_bounds__(kExchangeThreads) exchange(const __grid_constant__ ExchangeArgs a) {
  launch_dependents();
  wait_for_predecessors();
  const uint32_t number = read_number(a);
  send_entry(a, number);
  receive_entries(a, number);
  __syncthreads();
  keep_number(a, number);
}

}  // namespace

bool reaches(const Device& device, const Device& peer) {
  int can = 0;
  check_cuda(cudaDeviceCanAccessPeer(&can, device.info().index, peer.info().index));
  return can != 0;
}

void prepare_exchange(const Device& device, std::span<const Device* const> peers) {
  device.use();
  for (const Device* const peer : peers) {
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer->info().index, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled)
      cudaGetLastError();  // is no error of a launch to come
    else
      check_cuda(status);
  }
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, exchange));
}

StopFlag::StopFlag() {
  void* word = nullptr;
  check_cuda(cudaHostAlloc(&word, sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped));
  word_ = static_cast<uint32_t*>(word);
  *word_ = 0;
}
StopFlag::~StopFlag() { cudaFreeHost(word_); }
void StopFlag::raise() noexcept { std::atomic_ref(*word_).store(1); }

void launch_exchange(const Device& device, Stream& stream, const ExchangeArgs& args) {
  const int64_t blocks = (units_of(args.count) + kExchangeThreads - 1) / kExchangeThreads;
  const auto taken = unsigned(std::clamp<int64_t>(blocks, 1, kExchangeBlocks));
  launch_kernel(device, stream, exchange, {dim3(taken), kExchangeThreads}, args);
}

}  // namespace lacuna::cuda
