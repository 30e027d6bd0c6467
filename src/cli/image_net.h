// src/cli/image_net.h - a FLUX.1 transformer on the device that the flags name.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "cli/command.h"
#include "cli/profile.h"
#include "core/thread_pool.h"
#include "io/image_checkpoint.h"
#include "kernels/cuda/device.h"
#include "model/flux/cuda_net.h"
#include "model/flux/net.h"

namespace lacuna::cli {

class ImageNet {
 public:
  /// step: the largest that is to run; its plans are those of the profile. The checkpoint must outlive the net. Throws
  /// Error naming tensor and file, and DoesNotFit.
  ImageNet(const io::ImageCheckpoint& checkpoint, const Common& common, const GpuFlags& gpu,
           const model::flux::CudaNetOptions& step, const ProfileFlags& profile = {});

  /// One step of images of one size, with the same coordinates: together on a CUDA device, one after the other on the
  /// CPU. out: [images][image tokens, out_channels].
  void predict(std::span<const model::flux::Inputs> images, std::span<float> out);

  /// One of them is there.
  model::flux::Net* cpu() { return cpu_.get(); }
  model::flux::CudaNet* cuda() { return cuda_.get(); }
  ThreadPool& pool() { return pool_; }
  cuda::Device* device() { return device_.get(); }  // of cuda()
  /// Of the card; "cpu" where there is none.
  std::string device_name() const;
  /// Of a CUDA device: the profile that the plans of products come from, or why there is none.
  const std::string& plan_source() const { return plan_source_; }

 private:
  ThreadPool pool_;
  std::string plan_source_;
  std::unique_ptr<cuda::Device> device_;
  std::unique_ptr<model::flux::Net> cpu_;
  std::unique_ptr<model::flux::CudaNet> cuda_;
};

}  // namespace lacuna::cli
