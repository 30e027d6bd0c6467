#include "calibrate/cuda_subject.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace lacuna::calibrate {
namespace {

static_assert(Histogram::kShift == cuda::kSizeShift && int64_t(Histogram::kBins) == cuda::kSizeBins);

std::span<const float> norms_of(const float* norms, int64_t K) {
  return norms == nullptr ? std::span<const float>() : std::span(norms, size_t(K));
}

class RowsOnDevice final : public SeenInputs {
 public:
  /// Those from `first` on. bins: what a count takes.
  RowsOnDevice(const model::CudaInputs& inputs, int64_t first, std::vector<uint32_t>& bins)
      : inputs_(inputs), first_(first), bins_(bins) {}
  int64_t tokens() const override { return inputs_.M - first_; }
  void add_sizes(std::span<const Sizes> to, int64_t) const override {
    for (const Sizes& sizes : to) {
      inputs_.count_sizes(first_, norms_of(sizes.norms, inputs_.K), bins_);
      sizes.histogram->add(bins_);
    }
  }

 private:
  const model::CudaInputs& inputs_;
  int64_t first_;
  std::vector<uint32_t>& bins_;
};

class CudaWalk final : public BlockWalk, public BlockTrials {
 public:
  CudaWalk(model::CudaDecoder& decoder, std::unique_ptr<model::CudaBlock> block)
      : decoder_(decoder), block_(std::move(block)) {}

  void begin(std::span<const int32_t> ids) override {
    decoder_.truncate(0);
    block_->begin(ids);
  }
  BlockTrials& next() override {
    block_->next();
    return *this;
  }
  bool has(model::Matrix matrix) const override { return block_->has(matrix); }
  int64_t weight_bytes(model::Matrix matrix) const override { return block_->weight_bytes(matrix); }
  void restart() override { block_->restart(); }
  double error(model::Matrix changed, const model::Block::Masks& masks, bool keep) override {
    return block_->error(changed, masks, keep);
  }

 private:
  model::CudaDecoder& decoder_;
  std::unique_ptr<model::CudaBlock> block_;
};

}  // namespace

CudaSubject::CudaSubject(model::CudaDecoder& decoder, ThreadPool& pool)
    : decoder_(decoder), pool_(pool), bins_(Histogram::kBins) {
  decoder_.begin_observing();
}

void CudaSubject::check_group(int64_t group) const {
  if (group > 1)
    throw Error(
        "--device cuda: thresholds of groups of {} inputs are found and used on the CPU; leave out --group, or "
        "--device cuda",
        group);
}

void CudaSubject::begin(int64_t tokens) {
  decoder_.truncate(0);
  if (tokens > decoder_.capacity())
    throw Error("windows of {} tokens; the context holds {}", tokens, decoder_.capacity());
}

void CudaSubject::leave_out(const model::CudaInputs& inputs) {
  if (!sparsity_) return;
  const auto l = size_t(inputs.layer), i = size_t(inputs.input);
  const model::Thresholds& thresholds = sparsity_->thresholds;
  const int64_t dense = std::clamp<int64_t>(sparsity_->dense_prefix - inputs.position, 0, inputs.M);
  model::SparsityCounts::Count& count = counts_[l][i];
  count.inputs += (inputs.M - dense) * inputs.K;
  if (thresholds.t[l][i] > 0)
    count.inactive += inputs.mask(
        dense, thresholds.t[l][i],
        thresholds.norms.empty() ? std::span<const float>() : std::span<const float>(thresholds.norms[l][i]));
}

void CudaSubject::run(std::span<const int32_t> ids, int64_t skipped, const InputObserver& observe) {
  decoder_.run_observed(ids,
                        [&](const model::CudaInputs& inputs) {
                          const int64_t first = std::clamp<int64_t>(skipped - inputs.position, 0, inputs.M);
                          if (const auto bad = inputs.find_non_finite(first))
                            refuse_value(inputs.layer, inputs.input, bad->first % inputs.K,
                                         inputs.position + bad->first / inputs.K, bad->second);
                          observe(inputs.layer, inputs.input, RowsOnDevice(inputs, first, bins_));
                          leave_out(inputs);
                        },
                        {});
}

void CudaSubject::score(std::span<const int32_t> ids, const model::Decoder::LogitsSink& sink) {
  decoder_.truncate(0);
  decoder_.run_observed(
      ids, [&](const model::CudaInputs& inputs) { leave_out(inputs); }, sink);
}

void CudaSubject::set_sparsity(std::optional<model::SparsityOptions> options) {
  if (options) {
    check_group(options->thresholds.group);
    check_sparsity(*options, config());
  }
  sparsity_ = std::move(options);
  counts_.assign(size_t(config().n_layers), {});
}

void CudaSubject::set_threshold(int64_t layer, model::Input input, float t) {
  sparsity_->thresholds.t[size_t(layer)][size_t(input)] = t;
}

model::PerInput CudaSubject::realised() const { return shares_of(counts_); }

std::unique_ptr<BlockWalk> CudaSubject::walk(int64_t windows, int64_t window, int64_t dense_prefix) {
  return std::make_unique<CudaWalk>(decoder_, decoder_.make_block(windows, window, dense_prefix));
}

}  // namespace lacuna::calibrate
