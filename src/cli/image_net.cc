#include "cli/image_net.h"

#include "cli/image_inputs.h"

namespace lacuna::cli {

ImageNet::ImageNet(const io::ImageCheckpoint& checkpoint, const Common& common, const GpuFlags& gpu,
                   const model::flux::CudaNetOptions& step, const ProfileFlags& profile)
    : pool_(common.threads) {
  if (common.device != "cuda") {
    cpu_ = std::make_unique<model::flux::Net>(checkpoint, pool_);
    return;
  }
  device_ = std::make_unique<cuda::Device>(gpu.options());
  const TensorCorePlans measured = load_tensor_core_plans(profile, device_->info());
  plan_source_ = measured.source;
  model::flux::CudaNetOptions with_plans = step;
  with_plans.plans = &measured.plans;
  cuda_ = std::make_unique<model::flux::CudaNet>(checkpoint, pool_, *device_, with_plans);
}

void ImageNet::predict(std::span<const model::flux::Inputs> images, std::span<float> out) {
  if (cuda_ != nullptr) return cuda_->predict(images, out);
  one_by_one([&](const model::flux::Inputs& image, std::span<float> to) { cpu_->predict(image, to); })(images, out);
}

std::string ImageNet::device_name() const { return device_ == nullptr ? "cpu" : device_->info().name; }

}  // namespace lacuna::cli
