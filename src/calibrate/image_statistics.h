// src/calibrate/image_statistics.h - what 2:4 masks of a diffusion transformer want to know of the inputs of its linear
// layers (io/image_masks.h), gathered while the net runs on the CPU; on a CUDA device: cuda_image_statistics.h.
//
// The norms file is safetensors, F32, with tensors named by the weight, as the checkpoint names it:
//   NAME.norm           [K]     L2 norm of each input over all tokens that the matrix read
//   NAME.entropy        [K]     entropy of each input's values in nats, where entropies were asked for
//   NAME.second_moment  [K, K]  X^T X / tokens, of the matrices chosen
// and the metadata "tokens.NAME" (tokens that the matrix read: of an expert those that were routed to it), "runs" (of
// the net: images times noise levels), "inputs" (the files), and "entropy_bins" where there are entropies. A matrix
// that read no token has no tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "calibrate/column_statistics.h"
#include "calibrate/second_moment.h"
#include "core/thread_pool.h"
#include "model/flux/linear.h"

namespace lacuna::calibrate {

struct ImageStatisticsOptions {
  /// Patterns of tensors whose second moments are gathered (io::matches_name).
  std::vector<std::string> second_moments = {};
  int64_t most_bytes = 0;  // for second moments
};

/// What was found of the input of matrices that share it (q, k, v).
struct InputStatistics {
  std::vector<std::string> weights;
  int64_t tokens = 0;
  std::vector<float> norms, entropies;  // [K]; entropies: empty where they were not asked for
  /// Empty where it was not asked for. Where it is made at each call, one at a time is in memory.
  std::function<std::shared_ptr<const SecondMoment>()> moment;
};

/// The norms file, atomically. metadata: joins "tokens.NAME" and "entropy_bins". Throws Error naming the matrix for a
/// value past float32.
void write_image_statistics(const std::string& path, std::span<const InputStatistics> inputs,
                            std::map<std::string, std::string> metadata);

/// Chooses the second moments that are gathered, and counts their memory.
class MomentBudget {
 public:
  explicit MomentBudget(ImageStatisticsOptions options) : options_(std::move(options)) {}
  /// Whether the one of an input of these weights was asked for; counts it then. Throws Error naming the first of them
  /// where all together would need more than most_bytes.
  bool take(std::span<const std::string> weights, int64_t K);
  int64_t bytes() const { return bytes_; }

 private:
  ImageStatisticsOptions options_;
  int64_t bytes_ = 0;
};

class ImageStatistics {
 public:
  ImageStatistics(ImageStatisticsOptions options, ThreadPool& pool) : budget_(std::move(options)), pool_(pool) {}

  /// The first pass. Throws Error naming the matrix for values that are not finite, and where second moments would need
  /// more than most_bytes.
  void add(const model::flux::LinearInput& input);
  /// The second pass, over the same inputs: counts values for the entropies.
  void count(const model::flux::LinearInput& input);

  /// Sorted by the first of the matrices that share an input. They refer to what was gathered. entropies: count() saw
  /// the inputs, too.
  std::vector<InputStatistics> results(bool entropies) const;
  int64_t moment_bytes() const { return budget_.bytes(); }

 private:
  struct Layer {
    std::vector<std::string> weights;
    ColumnStatistics columns;
    std::shared_ptr<SecondMoment> moment;
  };
  Layer& layer_of(const model::flux::LinearInput& input);
  MomentBudget budget_;
  ThreadPool& pool_;
  std::map<std::string, Layer, std::less<>> layers_;  // by the first of the matrices that share an input
};

}  // namespace lacuna::calibrate
