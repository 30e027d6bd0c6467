// src/calibrate/subject.h - a model as calibration runs it, on some device: tokens in batches whose inputs are seen
// and, where thresholds are set, left out.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "calibrate/block_trials.h"
#include "calibrate/histogram.h"
#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "model/decoder.h"
#include "model/sparsity.h"

namespace lacuna::calibrate {

/// Inputs of one group in a batch: some rows of K values.
class SeenInputs {
 public:
  /// A histogram and the column norms of its criterion, [K]; nullptr: magnitude.
  struct Sizes {
    const float* norms = nullptr;
    Histogram* histogram = nullptr;
  };
  virtual ~SeenInputs() = default;
  virtual int64_t tokens() const = 0;
  /// Adds the rows' sizes to each histogram. group > 1: those of their groups (kernels::group_size).
  virtual void add_sizes(std::span<const Sizes> to, int64_t group) const = 0;
};
using InputObserver = std::function<void(int64_t layer, model::Input input, const SeenInputs& inputs)>;

class Subject {
 public:
  Subject() = default;
  virtual ~Subject() = default;
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  virtual const model::Config& config() const = 0;
  virtual ThreadPool& pool() const = 0;
  virtual model::InputBytes bytes() const = 0;
  /// Throws Error for thresholds of groups of so many inputs where the device has none.
  virtual void check_group(int64_t group) const = 0;

  /// A new sequence of at most `tokens`.
  virtual void begin(int64_t tokens) = 0;
  static constexpr int64_t kBatch = 512;
  /// Appends up to kBatch ids. `observe` sees every group's inputs before anything is left out, without the positions
  /// below `skipped`. Throws Error naming layer, input and position of a value there that is not finite.
  virtual void run(std::span<const int32_t> ids, int64_t skipped, const InputObserver& observe) = 0;
  /// The logits of ids, a sequence of its own, in order.
  virtual void score(std::span<const int32_t> ids, const model::Decoder::LogitsSink& sink) = 0;

  /// As Decoder's: every token of a batch has its own inputs left out.
  virtual void set_sparsity(std::optional<model::SparsityOptions> options) = 0;
  virtual void set_threshold(int64_t layer, model::Input input, float t) = 0;
  /// Share of each input that was left out since set_sparsity(), tokens that ran dense not counted.
  virtual model::PerInput realised() const = 0;

  /// The blocks for a search on `windows` windows of `window` tokens. Takes memory; throws Error where it does not fit.
  virtual std::unique_ptr<BlockWalk> walk(int64_t windows, int64_t window, int64_t dense_prefix) = 0;
};

/// Shares of inputs that were left out.
model::PerInput shares_of(std::span<const std::array<model::SparsityCounts::Count, model::kInputs>> layers);
[[noreturn]] void refuse_value(int64_t layer, model::Input input, int64_t k, int64_t position, float value);

/// The decoder on the CPU. Both outlive the subject.
class CpuSubject final : public Subject {
 public:
  CpuSubject(model::Decoder& decoder, const io::Checkpoint& checkpoint) : decoder_(decoder), checkpoint_(checkpoint) {}

  const model::Config& config() const override { return decoder_.config(); }
  ThreadPool& pool() const override { return decoder_.pool(); }
  model::InputBytes bytes() const override { return decoder_.sparsity_counts().bytes; }
  void check_group(int64_t) const override {}
  void begin(int64_t tokens) override;
  void run(std::span<const int32_t> ids, int64_t skipped, const InputObserver& observe) override;
  void score(std::span<const int32_t> ids, const model::Decoder::LogitsSink& sink) override;
  void set_sparsity(std::optional<model::SparsityOptions> options) override;
  void set_threshold(int64_t layer, model::Input input, float t) override;
  model::PerInput realised() const override;
  std::unique_ptr<BlockWalk> walk(int64_t windows, int64_t window, int64_t dense_prefix) override;

 private:
  model::Decoder& decoder_;
  const io::Checkpoint& checkpoint_;
  std::optional<model::Session> session_, scored_;
};

}  // namespace lacuna::calibrate
