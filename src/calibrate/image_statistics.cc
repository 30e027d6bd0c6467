#include "calibrate/image_statistics.h"

#include <algorithm>

#include "core/error.h"
#include "io/float_tensors.h"
#include "io/image_policy.h"

namespace lacuna::calibrate {

using model::flux::LinearInput;

ImageStatistics::Layer& ImageStatistics::layer_of(const LinearInput& input) {
  const std::string& first = input.weights.front();
  const auto found = layers_.find(first);
  if (found != layers_.end()) return found->second;
  Layer layer{{input.weights.begin(), input.weights.end()}, ColumnStatistics(input.K), {}};
  const auto chosen = [&](const std::string& weight) {
    return std::any_of(options_.second_moments.begin(), options_.second_moments.end(),
                       [&](const std::string& pattern) { return io::matches_name(pattern, weight); });
  };
  if (std::any_of(layer.weights.begin(), layer.weights.end(), chosen)) {
    const int64_t bytes = SecondMoment::bytes(input.K);
    if (moment_bytes_ + bytes > options_.most_bytes)
      throw Error(
          "{}: its second moment takes {} bytes, {} with those before it, more than the {} allowed; choose fewer "
          "matrices at a time, or allow more memory",
          first, bytes, moment_bytes_ + bytes, options_.most_bytes);
    layer.moment.emplace(input.K);
    moment_bytes_ += bytes;
  }
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

void ImageStatistics::write(const std::string& path, bool entropies,
                            std::map<std::string, std::string> metadata) const {
  if (entropies) metadata["entropy_bins"] = std::to_string(kEntropyBins);
  io::FloatTensorWriter::Plan plan;
  for (const auto& [first, layer] : layers_) {
    for (const std::string& weight : layer.weights) {
      metadata["tokens." + weight] = std::to_string(layer.columns.tokens());
      const int64_t K = layer.columns.K();
      plan.push_back({weight + ".norm", {K}});
      if (entropies) plan.push_back({weight + ".entropy", {K}});
      if (layer.moment) plan.push_back({weight + ".second_moment", {K, K}});
    }
  }
  io::FloatTensorWriter writer(path, plan, metadata);
  std::vector<float> row;
  for (const auto& [first, layer] : layers_) {
    const std::vector<float> norms = layer.columns.norms(), entropy = entropies ? layer.columns.entropies() : norms;
    for (size_t i = 0; i < layer.weights.size(); ++i) {
      writer.write(norms);
      if (entropies) writer.write(entropy);
      if (!layer.moment) continue;
      row.resize(size_t(layer.moment->K()));
      for (int64_t k = 0; k < layer.moment->K(); ++k) {
        naming_file(first, [&] { layer.moment->row(k, row); });
        writer.write(row);
      }
    }
  }
  writer.finish();
}

}  // namespace lacuna::calibrate
