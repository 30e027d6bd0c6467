// src/model/flux/binder.h - the net's weights, found by name, their shapes checked.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "io/image_checkpoint.h"
#include "kernels/linear.h"
#include "model/flux/config.h"
#include "model/flux/names.h"

namespace lacuna::model::flux {

enum class Bias : uint8_t { needed, none };

class Binder {
 public:
  /// biases: owns what the views refer to.
  Binder(const io::ImageCheckpoint& checkpoint, const Config& config, std::deque<std::vector<float>>& biases);

  /// A matrix [N, K], with its bias. Throws Error naming tensor and file.
  kernels::WeightView weight(const std::string& name, int64_t N, int64_t K, Bias bias = Bias::needed);
  /// A norm's weight: [K].
  std::vector<float> norm(const std::string& name, int64_t K);
  /// Throws Error for a tensor that nothing read: the file is of a net that this program does not know.
  void check_all_used() const;

 private:
  Place place(const std::string& name) const;
  /// The tensor of this name, which must be [N, K].
  const io::Tensor& tensor(const std::string& name, layout::Shape shape);
  /// Values [first, first + count) of a vector.
  std::vector<float> values(const io::Tensor& vector, int64_t first, int64_t count) const;

  const io::ImageCheckpoint& checkpoint_;
  std::map<std::string, Place> places_;
  std::deque<std::vector<float>>& biases_;
  std::set<std::string, std::less<>> used_;
};

}  // namespace lacuna::model::flux
