// src/model/engine.h - one sequence of a model on some device: what generation and scoring need of it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "model/config.h"
#include "model/decoder.h"
#include "model/sampler.h"

namespace lacuna::model {

class Engine {
 public:
  Engine() = default;
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  virtual const Config& config() const = 0;
  virtual int64_t length() const = 0;
  virtual int64_t capacity() const = 0;
  /// Forgets everything from position `length` on.
  virtual void truncate(int64_t length) = 0;

  // Each appends ids at positions [length(), +ids.size()). Throws Error when they do not fit or an id is outside the
  // vocabulary.
  /// Without logits.
  virtual void append(std::span<const int32_t> ids) = 0;
  /// The last one's logits: [n_vocab], valid until the next call.
  virtual std::span<const float> forward(std::span<const int32_t> ids) = 0;
  /// What the sampler takes of the last one's logits. Throws BadLogits as it does; the ids are appended then too.
  virtual int32_t next(std::span<const int32_t> ids, Sampler& sampler) { return sampler.sample(forward(ids)); }
  /// All logits, in order.
  virtual void score(std::span<const int32_t> ids, const Decoder::LogitsSink& sink) = 0;

  /// Inputs that tokens left out so far; an engine that does not count: nothing.
  virtual SparsityCounts sparsity_counts() const = 0;
};

/// A session of the CPU's decoder, which outlives it.
class CpuEngine final : public Engine {
 public:
  /// Throws as Session does.
  CpuEngine(Decoder& decoder, int64_t capacity, kernels::KvType kv)
      : decoder_(decoder), session_(decoder, capacity, kv) {}

  const Config& config() const override { return decoder_.config(); }
  int64_t length() const override { return session_.length(); }
  int64_t capacity() const override { return session_.capacity(); }
  void truncate(int64_t length) override { session_.truncate(length); }
  void append(std::span<const int32_t> ids) override { decoder_.forward(session_, ids, Decoder::Want::none, {}); }
  std::span<const float> forward(std::span<const int32_t> ids) override { return decoder_.forward(session_, ids); }
  void score(std::span<const int32_t> ids, const Decoder::LogitsSink& sink) override {
    decoder_.forward(session_, ids, Decoder::Want::all, sink);
  }
  SparsityCounts sparsity_counts() const override { return decoder_.sparsity_counts(); }

 private:
  Decoder& decoder_;
  Session session_;
};

}  // namespace lacuna::model
