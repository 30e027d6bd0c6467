#include "compress/device.h"

#include <torch/version.h>

#include <string>

#define LACUNA_TORCH_COUNTS_MEMORY (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR >= 209)
#if LACUNA_TORCH_COUNTS_MEMORY
#include <c10/core/CachingDeviceAllocator.h>
#endif

#include "core/error.h"
#include "solver/columns.h"

namespace lacuna::compress {
namespace {

#if LACUNA_TORCH_COUNTS_MEMORY
/// nullptr where nothing is counted.
c10::DeviceAllocator* counting_allocator(at::Device device) {
  return device.is_cpu() ? nullptr : dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
}
#endif

}  // namespace

at::Device cuda_device(int index) {
  if (!at::globalContext().hasCUDA())
    throw Error(
        "--device cuda: LibTorch sees no CUDA device: Debian's is made without CUDA, then build with scripts/build.sh "
        "--cuda --torch FOLDER, the torch folder of a PyTorch for CUDA; with such a one see that nvidia-smi lists a "
        "device");
  if (!solver::columns_on_cuda())
    throw Error(
        "--device cuda: this program was built without nvcc, which solving on a GPU needs: build with scripts/build.sh "
        "--cuda --torch FOLDER, the torch folder of a PyTorch for CUDA");
  const at::Device device(at::kCUDA, at::DeviceIndex(index));
  try {
    at::zeros({1}, at::device(device).dtype(at::kFloat)).item<float>();
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    throw Error("--gpu {}: {}", index, what.substr(0, what.find('\n')));
  }
  return device;
}

DeviceMemory::DeviceMemory(at::Device device) : device_(device) {
#if LACUNA_TORCH_COUNTS_MEMORY
  if (c10::DeviceAllocator* const allocator = counting_allocator(device)) allocator->resetPeakStats(device.index());
#endif
}

int64_t DeviceMemory::peak() const {
#if LACUNA_TORCH_COUNTS_MEMORY
  constexpr auto kAll = size_t(c10::CachingAllocator::StatType::AGGREGATE);
  if (c10::DeviceAllocator* const allocator = counting_allocator(device_))
    return allocator->getDeviceStats(device_.index()).allocated_bytes[kAll].peak;
#endif
  return 0;
}

}  // namespace lacuna::compress
