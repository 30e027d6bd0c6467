// src/model/cuda_inputs.h - what the layers of a decoder on an NVIDIA device read, as calibration sees it: one group's
// inputs in a batch, which lie in device memory and may be left out there.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "kernels/cuda/calibration.h"
#include "kernels/cuda/device.h"
#include "model/sparsity.h"

namespace lacuna::model {

/// Device memory of CudaInputs, and what it launches on.
class CudaInputsSpace {
 public:
  /// widest: the widest input. Throws DoesNotFit.
  CudaInputsSpace(cuda::Device& device, cuda::Stream& stream, int64_t widest);

 private:
  friend class CudaInputs;
  /// On the device, or nullptr for none.
  const float* upload(std::span<const float> norms);
  cuda::Device& device_;
  cuda::Stream& stream_;
  cuda::Buffer bins_, norms_, inactive_, bad_;
};

/// Inputs [M, K] of a layer's group, the first row at `position`.
struct BatchInputs {
  int64_t layer = 0;
  Input input = Input::attn_in;
  int64_t M = 0, K = 0, position = 0;
};

/// Their values, f32. Valid while the observer runs. Every call waits for the device.
class CudaInputs : public BatchInputs {
 public:
  CudaInputs(const BatchInputs& which, float* x, CudaInputsSpace& space) : BatchInputs(which), space_(space), x_(x) {}

  /// Of rows from `first` on: how many sizes |x| * norms[k] (norms empty: |x|) are in each bin: [cuda::kSizeBins].
  void count_sizes(int64_t first, std::span<const float> norms, std::span<uint32_t> bins) const;
  /// Of rows from `first` on: place (row K + k) and value of the first one that is not finite.
  std::optional<std::pair<int64_t, float>> find_non_finite(int64_t first) const;
  /// Leaves out what is below t of the rows from `first` on; returns how many inputs these are.
  int64_t mask(int64_t first, float t, std::span<const float> norms) const;

 private:
  CudaInputsSpace& space_;
  float* x_;
};
using CudaInputsObserver = std::function<void(const CudaInputs& inputs)>;

}  // namespace lacuna::model
