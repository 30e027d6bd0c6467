#include "cli/image_net.h"

#include <fmt/format.h>

#include "core/error.h"

namespace lacuna::cli {

ImageNet::ImageNet(const io::ImageCheckpoint& checkpoint, const Common& common, const GpuFlags& gpu,
                   const model::flux::CudaNetOptions& step)
    : pool_(common.threads) {
  if (common.device != "cuda") {
    cpu_ = std::make_unique<model::flux::Net>(checkpoint, pool_);
    return;
  }
  device_ = std::make_unique<cuda::Device>(gpu.options());
  cuda_ = std::make_unique<model::flux::CudaNet>(checkpoint, pool_, *device_, step);
}

void ImageNet::predict(std::span<const model::flux::Inputs> images, std::span<float> out) {
  if (cuda_ != nullptr) return cuda_->predict(images, out);
  const size_t size = out.size() / images.size();
  for (size_t b = 0; b < images.size(); ++b)
    naming_file(fmt::format("image {}", b), [&] { cpu_->predict(images[b], out.subspan(b * size, size)); });
}

std::string ImageNet::device_name() const { return device_ == nullptr ? "cpu" : device_->info().name; }

}  // namespace lacuna::cli
