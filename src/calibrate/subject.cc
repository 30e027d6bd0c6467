#include "calibrate/subject.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "kernels/active.h"

namespace lacuna::calibrate {
namespace {

void add_sizes(const float* x, int64_t M, int64_t K, const SeenInputs::Sizes& to, int64_t group) {
  const float* const norms = to.norms;
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t k = 0; k < K; k += group) {
      if (group > 1) {
        to.histogram->add(kernels::group_size(x + m * K + k, norms ? norms + k : nullptr, std::min(group, K - k)));
        continue;
      }
      const float size = std::abs(x[m * K + k]);
      to.histogram->add(norms ? size * norms[k] : size);
    }
  }
}

class RowsOnCpu final : public SeenInputs {
 public:
  RowsOnCpu(const float* x, int64_t M, int64_t K, ThreadPool& pool) : x_(x), M_(M), K_(K), pool_(pool) {}
  int64_t tokens() const override { return M_; }
  void add_sizes(std::span<const Sizes> to, int64_t group) const override {
    pool_.parallel_for(int64_t(to.size()), 1, [&](int64_t begin, int64_t end) {  // each has tables of its own
      for (int64_t i = begin; i < end; ++i) calibrate::add_sizes(x_, M_, K_, to[size_t(i)], group);
    });
  }

 private:
  const float* x_;
  int64_t M_, K_;
  ThreadPool& pool_;
};

class CpuWalk final : public BlockWalk {
 public:
  CpuWalk(model::Decoder& decoder, const io::Checkpoint& checkpoint, int64_t windows, int64_t window,
          int64_t dense_prefix)
      : decoder_(decoder), checkpoint_(checkpoint), windows_(windows), window_(window), dense_prefix_(dense_prefix) {}

  void begin(std::span<const int32_t> ids) override {
    const int64_t width = decoder_.config().n_embd;
    trials_.reset();
    layer_ = 0;
    x_.resize(size_t(windows_ * window_ * width));
    for (int64_t w = 0; w < windows_; ++w)
      decoder_.embed(ids.subspan(size_t(w * window_), size_t(window_)), 0, x_.data() + w * window_ * width);
  }
  BlockTrials& next() override {
    if (trials_) x_ = trials_->dense_output();
    trials_.reset();
    block_.emplace(checkpoint_, decoder_.config(), layer_++, windows_, window_, decoder_.pool());
    return trials_.emplace(*block_, x_.data(), dense_prefix_);
  }

 private:
  model::Decoder& decoder_;
  const io::Checkpoint& checkpoint_;
  int64_t windows_, window_, dense_prefix_, layer_ = 0;
  std::vector<float> x_;
  std::optional<model::Block> block_;
  std::optional<CpuTrials> trials_;
};

}  // namespace

void refuse_value(int64_t layer, model::Input input, int64_t k, int64_t position, float value) {
  throw Error("layer {}, {}: value {} of the token at position {} is {}; thresholds need finite activations", layer,
              name_of(input), k, position, value);
}

model::PerInput shares_of(std::span<const std::array<model::SparsityCounts::Count, model::kInputs>> layers) {
  model::PerInput out(layers.size());
  for (size_t l = 0; l < out.size(); ++l)
    for (size_t i = 0; i < size_t(model::kInputs); ++i) out[l][i] = float(layers[l][i].share());
  return out;
}

void CpuSubject::begin(int64_t tokens) {
  if (!session_ || session_->capacity() < tokens) session_.emplace(decoder_, tokens);
  session_->truncate(0);
}

void CpuSubject::run(std::span<const int32_t> ids, int64_t skipped, const InputObserver& observe) {
  struct Observing {  // the observer goes whatever happens
    model::Decoder& decoder;
    ~Observing() { decoder.set_observer({}); }
  };
  const Observing guard{decoder_};
  decoder_.set_observer([&](int64_t layer, model::Input input, const float* x, int64_t M, int64_t K, int64_t position) {
    const int64_t out = std::clamp<int64_t>(skipped - position, 0, M);
    for (int64_t i = out * K; i < M * K; ++i)
      if (!std::isfinite(x[i])) refuse_value(layer, input, i % K, position + i / K, x[i]);
    observe(layer, input, RowsOnCpu(x + out * K, M - out, K, pool()));
  });
  decoder_.forward(*session_, ids, model::Decoder::Want::layers, {});
}

void CpuSubject::score(std::span<const int32_t> ids, const model::Decoder::LogitsSink& sink) {
  const auto tokens = int64_t(ids.size());
  if (!scored_ || scored_->capacity() < tokens) scored_.emplace(decoder_, tokens, kernels::KvType::f32);
  scored_->truncate(0);
  decoder_.forward(*scored_, ids, model::Decoder::Want::all, sink);
}

void CpuSubject::set_sparsity(std::optional<model::SparsityOptions> options) {
  if (options) options->mask_batches = true;
  decoder_.set_sparsity(std::move(options));
}

void CpuSubject::set_threshold(int64_t layer, model::Input input, float t) { decoder_.set_threshold(layer, input, t); }

model::PerInput CpuSubject::realised() const { return shares_of(decoder_.sparsity_counts().layers); }

std::unique_ptr<BlockWalk> CpuSubject::walk(int64_t windows, int64_t window, int64_t dense_prefix) {
  return std::make_unique<CpuWalk>(decoder_, checkpoint_, windows, window, dense_prefix);
}

}  // namespace lacuna::calibrate
