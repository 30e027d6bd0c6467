#include "calibrate/image_statistics.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "io/float_tensors.h"
#include "io/image_policy.h"

namespace lacuna::calibrate {

using model::flux::LinearInput;

bool MomentBudget::take(std::span<const std::string> weights, int64_t K) {
  const auto chosen = [&](const std::string& weight) {
    return std::any_of(options_.second_moments.begin(), options_.second_moments.end(),
                       [&](const std::string& pattern) { return io::matches_name(pattern, weight); });
  };
  if (std::none_of(weights.begin(), weights.end(), chosen)) return false;
  const int64_t bytes = SecondMoment::bytes(K);
  if (bytes_ + bytes > options_.most_bytes)
    throw Error(
        "{}: its second moment takes {} bytes, {} with those before it, more than the {} allowed; choose fewer "
        "matrices at a time, or allow more memory",
        weights.front(), bytes, bytes_ + bytes, options_.most_bytes);
  bytes_ += bytes;
  return true;
}

ImageStatistics::Layer& ImageStatistics::layer_of(const LinearInput& input) {
  const std::string& first = input.weights.front();
  const auto found = layers_.find(first);
  if (found != layers_.end()) return found->second;
  Layer layer{{input.weights.begin(), input.weights.end()}, ColumnStatistics(input.K), {}};
  if (budget_.take(input.weights, input.K)) layer.moment = std::make_shared<SecondMoment>(input.K);
  return layers_.emplace(first, std::move(layer)).first->second;
}

void ImageStatistics::add(const LinearInput& input) {
  Layer& layer = layer_of(input);
  naming_file(input.weights.front(), [&] { layer.columns.add(input.x, input.stride, input.M, &pool_); });
  if (layer.moment) layer.moment->add(input.x, input.stride, input.M, pool_);
}

void ImageStatistics::count(const LinearInput& input) {
  layer_of(input).columns.count(input.x, input.stride, input.M, &pool_);
}

std::vector<InputStatistics> ImageStatistics::results(bool entropies) const {
  std::vector<InputStatistics> out;
  for (const auto& [first, layer] : layers_) {
    InputStatistics one{layer.weights, layer.columns.tokens(), layer.columns.norms(), {}, {}};
    if (entropies) one.entropies = layer.columns.entropies();
    if (layer.moment) one.moment = [moment = layer.moment] { return moment; };
    out.push_back(std::move(one));
  }
  return out;
}

void write_image_statistics(const std::string& path, std::span<const InputStatistics> inputs,
                            std::map<std::string, std::string> metadata) {
  io::FloatTensorWriter::Plan plan;
  for (const InputStatistics& input : inputs) {
    const auto K = int64_t(input.norms.size());
    for (const std::string& weight : input.weights) {
      metadata["tokens." + weight] = std::to_string(input.tokens);
      plan.push_back({weight + ".norm", {K}});
      if (!input.entropies.empty()) {
        metadata["entropy_bins"] = std::to_string(kEntropyBins);
        plan.push_back({weight + ".entropy", {K}});
      }
      if (input.moment) plan.push_back({weight + ".second_moment", {K, K}});
    }
  }
  io::FloatTensorWriter writer(path, plan, metadata);
  std::vector<float> row;
  for (const InputStatistics& input : inputs) {
    const std::shared_ptr<const SecondMoment> moment = input.moment ? input.moment() : nullptr;
    for (size_t i = 0; i < input.weights.size(); ++i) {
      writer.write(input.norms);
      if (!input.entropies.empty()) writer.write(input.entropies);
      if (moment == nullptr) continue;
      row.resize(size_t(moment->K()));
      for (int64_t k = 0; k < moment->K(); ++k) {
        naming_file(input.weights.front(), [&] { moment->row(k, row); });
        writer.write(row);
      }
    }
  }
  writer.finish();
}

}  // namespace lacuna::calibrate
