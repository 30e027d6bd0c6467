#include "compress/device.h"

#include <string>

#include "core/error.h"
#include "solver/columns.h"

namespace lacuna::compress {

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

}  // namespace lacuna::compress
