#include "calibrate/cuda_image_statistics.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "core/error.h"

namespace lacuna::calibrate {

using model::flux::CudaLinearInput;

static_assert(cuda::kColumnBins == kEntropyBins);

namespace {

cuda::ColumnInputs inputs_of(const CudaLinearInput& input) { return {input.x, input.M, input.K, input.stride}; }

cuda::Buffer zeros(cuda::Device& device, int64_t bytes, const std::string& what) {
  cuda::Buffer out(device, bytes, what);
  out.fill(0);
  return out;
}

template <class T>
std::vector<T> values_of(const cuda::Buffer& buffer, int64_t count) {
  std::vector<T> out(static_cast<size_t>(count));
  buffer.download(std::as_writable_bytes(std::span(out)));
  return out;
}

}  // namespace

cuda::ColumnSums CudaImageStatistics::Layer::sums() const {
  auto* const squares = columns.as<double>();
  auto* const least = reinterpret_cast<float*>(squares + K);
  return {squares, least, least + K};
}

CudaImageStatistics::Layer& CudaImageStatistics::layer_of(const CudaLinearInput& input) {
  const std::string& first = input.weights.front();
  const auto found = layers_.find(first);
  if (found != layers_.end()) return found->second;
  const int64_t K = input.K;
  Layer layer{{input.weights.begin(), input.weights.end()}, K, 0, 0, {}, {}, {}};
  layer.columns = zeros(device_, K * int64_t(sizeof(double) + 2 * sizeof(float)), first + ": sums of its inputs");
  std::vector<float> range(size_t(K), std::numeric_limits<float>::infinity());
  range.resize(size_t(2 * K), -std::numeric_limits<float>::infinity());
  layer.columns.upload(std::as_bytes(std::span(range)), K * int64_t(sizeof(double)));
  if (entropies_)
    layer.counts = zeros(device_, K * kEntropyBins * int64_t(sizeof(uint32_t)),
                         first + ": counts of its inputs' values for --entropies");
  if (budget_.take(input.weights, K))
    layer.moment = zeros(device_, SecondMoment::bytes(K),
                         first + ": its second moment, beside those before it (choose fewer matrices at a time)");
  return layers_.emplace(first, std::move(layer)).first->second;
}

void CudaImageStatistics::add(const CudaLinearInput& input) {
  Layer& layer = layer_of(input);
  cuda::launch_column_sums(device_, *input.stream, inputs_of(input), layer.sums());
  if (layer.moment.data() != nullptr)
    cuda::launch_second_moment(device_, *input.stream, inputs_of(input), layer.moment.as<double>());
  layer.tokens += input.M;
}

void CudaImageStatistics::count(const CudaLinearInput& input) {
  Layer& layer = layer_of(input);
  layer.counted += input.M;
  if (layer.counted > int64_t{std::numeric_limits<uint32_t>::max()})
    throw Error("{}: {} tokens are more than are counted on the device; give fewer --inputs", input.weights.front(),
                layer.counted);
  const cuda::ColumnSums sums = layer.sums();
  cuda::launch_column_counts(device_, *input.stream, inputs_of(input), sums.least, sums.most,
                             layer.counts.as<uint32_t>());
}

std::vector<float> CudaImageStatistics::norms_of(const Layer& layer) const {
  std::vector<float> out;
  for (const double squares : values_of<double>(layer.columns, layer.K)) {
    if (!std::isfinite(squares))
      throw Error("{}: input {} is not finite in one of {} tokens; the statistics need finite activations",
                  layer.weights.front(), out.size(), layer.tokens);
    out.push_back(float(std::sqrt(squares)));
  }
  return out;
}

std::vector<float> CudaImageStatistics::entropies_of(const Layer& layer) const {
  if (layer.counted != layer.tokens)
    throw Error("{}: {} tokens were counted, but the ranges are of {}; show the second pass the tokens of the first",
                layer.weights.front(), layer.counted, layer.tokens);
  const std::vector<uint32_t> counts = values_of<uint32_t>(layer.counts, layer.K * kEntropyBins);
  std::vector<float> out;
  for (int64_t k = 0; k < layer.K; ++k) {
    const auto of_input = counts.begin() + k * kEntropyBins;
    out.push_back(float(entropy_of(std::vector<int64_t>(of_input, of_input + kEntropyBins))));
  }
  return out;
}

std::vector<InputStatistics> CudaImageStatistics::results() const {
  std::vector<InputStatistics> out;
  for (const auto& [first, layer] : layers_) {
    InputStatistics one{layer.weights, layer.tokens, norms_of(layer), {}, {}};
    if (entropies_) one.entropies = entropies_of(layer);
    if (layer.moment.data() != nullptr)
      one.moment = [&layer = layer] {
        return std::make_shared<const SecondMoment>(layer.K, layer.tokens,
                                                    values_of<double>(layer.moment, layer.K * (layer.K + 1) / 2));
      };
    out.push_back(std::move(one));
  }
  return out;
}

}  // namespace lacuna::calibrate
