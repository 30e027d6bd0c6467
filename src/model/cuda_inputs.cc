#include "model/cuda_inputs.h"

namespace lacuna::model {
namespace {

constexpr uint32_t kNone = 0xffffffffu;

}  // namespace

CudaInputsSpace::CudaInputsSpace(cuda::Device& device, cuda::Stream& stream, int64_t widest)
    : device_(device),
      stream_(stream),
      bins_(device, cuda::kSizeBins * int64_t(sizeof(uint32_t)), "sizes of inputs"),
      norms_(device, widest * int64_t(sizeof(float)), "column norms"),
      inactive_(device, sizeof(unsigned long long), "a count"),
      bad_(device, sizeof(uint32_t), "a place") {}

const float* CudaInputsSpace::upload(std::span<const float> norms) {
  if (norms.empty()) return nullptr;
  norms_.upload(std::as_bytes(norms));
  return norms_.as<float>();
}

void CudaInputs::count_sizes(int64_t first, std::span<const float> norms, std::span<uint32_t> bins) const {
  space_.bins_.fill(0);
  cuda::CountSizesArgs args;
  args.x = x_ + first * K;
  args.M = M - first;
  args.K = K;
  args.norms = space_.upload(norms);
  args.bins = space_.bins_.as<uint32_t>();
  cuda::launch_count_sizes(space_.device_, space_.stream_, args);
  space_.stream_.synchronize();
  space_.bins_.download(std::as_writable_bytes(bins));
}

std::optional<std::pair<int64_t, float>> CudaInputs::find_non_finite(int64_t first) const {
  uint32_t at = kNone;
  space_.bad_.upload(std::as_bytes(std::span(&at, 1)));
  cuda::launch_find_non_finite(space_.device_, space_.stream_, x_ + first * K, (M - first) * K,
                               space_.bad_.as<uint32_t>());
  space_.stream_.synchronize();
  space_.bad_.download(std::as_writable_bytes(std::span(&at, 1)));
  if (at == kNone) return std::nullopt;
  const int64_t place = first * K + int64_t(at);
  float value = 0;
  cuda::launch_mask_rows(space_.device_, space_.stream_,
                         {.x = x_ + place, .M = 1, .K = 1, .y = space_.bad_.as<float>()});  // a copy
  space_.stream_.synchronize();
  space_.bad_.download(std::as_writable_bytes(std::span(&value, 1)));
  return std::pair{place, value};
}

int64_t CudaInputs::mask(int64_t first, float t, std::span<const float> norms) const {
  unsigned long long inactive = 0;
  space_.inactive_.upload(std::as_bytes(std::span(&inactive, 1)));
  cuda::MaskRowsArgs args;
  args.x = args.y = x_ + first * K;
  args.M = M - first;
  args.K = K;
  args.t = t;
  args.norms = space_.upload(norms);
  args.inactive = space_.inactive_.as<unsigned long long>();
  cuda::launch_mask_rows(space_.device_, space_.stream_, args);
  space_.stream_.synchronize();
  space_.inactive_.download(std::as_writable_bytes(std::span(&inactive, 1)));
  return int64_t(inactive);
}

}  // namespace lacuna::model
