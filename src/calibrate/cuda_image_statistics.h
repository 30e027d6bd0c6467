// src/calibrate/cuda_image_statistics.h - the statistics of image_statistics.h, gathered on a CUDA device from the bf16
// inputs of the net there: sums in double precision, in an order that does not change from run to run.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "calibrate/image_statistics.h"
#include "kernels/cuda/column_statistics.h"
#include "kernels/cuda/device.h"
#include "model/flux/cuda_net.h"

namespace lacuna::calibrate {

/// Everything lies in the device's memory until results() are read: of an input of K values 16 K bytes, for entropies
/// 400 K more, for a second moment SecondMoment::bytes(K).
class CudaImageStatistics {
 public:
  /// entropies: count() will be called. The device must outlive what was gathered.
  CudaImageStatistics(ImageStatisticsOptions options, bool entropies, cuda::Device& device)
      : budget_(std::move(options)), entropies_(entropies), device_(device) {}

  /// The first pass. Throws Error naming the matrix where second moments would need more than most_bytes, and
  /// DoesNotFit, naming it too, where the device's memory does not hold what is gathered of it.
  void add(const model::flux::CudaLinearInput& input);
  /// The second pass, over the same inputs.
  void count(const model::flux::CudaLinearInput& input);

  /// As ImageStatistics::results(); second moments are copied from the device when they are asked for. Waits for the
  /// device. Throws Error naming the matrix for inputs that were not finite.
  std::vector<InputStatistics> results() const;
  int64_t moment_bytes() const { return budget_.bytes(); }

 private:
  struct Layer {
    std::vector<std::string> weights;
    int64_t K = 0, tokens = 0, counted = 0;
    cuda::Buffer columns;  // squares, least, most
    cuda::Buffer counts, moment;
    cuda::ColumnSums sums() const;
  };
  Layer& layer_of(const model::flux::CudaLinearInput& input);
  std::vector<float> norms_of(const Layer& layer) const;
  std::vector<float> entropies_of(const Layer& layer) const;

  MomentBudget budget_;
  bool entropies_;
  cuda::Device& device_;
  std::map<std::string, Layer, std::less<>> layers_;
};

}  // namespace lacuna::calibrate
