// src/calibrate/image_statistics.h - what 2:4 masks of a diffusion transformer want to know of the inputs of its linear
// layers (io/image_masks.h), gathered while the net runs.
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
#include <map>
#include <optional>
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

/// Matrices that read one input (q, k, v) share its statistics.
class ImageStatistics {
 public:
  ImageStatistics(ImageStatisticsOptions options, ThreadPool& pool) : options_(std::move(options)), pool_(pool) {}

  /// The first pass. Throws Error naming the matrix for values that are not finite, and where second moments would need
  /// more than most_bytes.
  void add(const model::flux::LinearInput& input);
  /// The second pass, over the same inputs: counts values for the entropies.
  void count(const model::flux::LinearInput& input);

  struct Layer {
    std::vector<std::string> weights;
    ColumnStatistics columns;
    std::optional<SecondMoment> moment;
  };
  /// By the first of the matrices that share an input.
  const std::map<std::string, Layer, std::less<>>& layers() const { return layers_; }
  int64_t moment_bytes() const { return moment_bytes_; }

  /// Atomically. metadata: joins "tokens.NAME" and "entropy_bins".
  void write(const std::string& path, bool entropies, std::map<std::string, std::string> metadata) const;

 private:
  Layer& layer_of(const model::flux::LinearInput& input);
  ImageStatisticsOptions options_;
  ThreadPool& pool_;
  std::map<std::string, Layer, std::less<>> layers_;
  int64_t moment_bytes_ = 0;
};

}  // namespace lacuna::calibrate
