#include "compress/device.h"

#include <string>

#include "core/error.h"

namespace lacuna::compress {

at::Device cuda_device(int index) {
  if (!at::globalContext().hasCUDA())
    throw Error(
        "--device cuda: this program's LibTorch sees no CUDA device; Debian's libtorch-dev is made without CUDA: build "
        "with -DLACUNA_TORCH naming the torch folder of an installed PyTorch that is made for it, and see that "
        "nvidia-smi lists a device");
  const at::Device device(at::kCUDA, at::DeviceIndex(index));
  try {
    at::zeros({1}, at::device(device).dtype(at::kFloat)).item<float>();
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    throw Error("--gpu {}: {}", index, what.substr(0, what.find('\n')));
  }
  return device;
}

}  // namespace lacuna::compress
