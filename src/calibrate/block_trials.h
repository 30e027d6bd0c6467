// src/calibrate/block_trials.h - what the greedy search tries: one block of a model with masks of its own for every
// matrix, on some device.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/block.h"

namespace lacuna::calibrate {

/// |a - b|^2; b: as many values as a.
double squared_distance(const std::vector<float>& a, const float* b);

/// A block that has run dense on its input x.
class BlockTrials {
 public:
  BlockTrials() = default;
  virtual ~BlockTrials() = default;
  BlockTrials(const BlockTrials&) = delete;
  BlockTrials& operator=(const BlockTrials&) = delete;

  virtual bool has(model::Matrix matrix) const = 0;
  virtual int64_t weight_bytes(model::Matrix matrix) const = 0;
  /// Nothing is left out from now on.
  virtual void restart() = 0;
  /// |y - dense|^2 / |dense - x|^2 of the block's output y under masks that differ from those kept in `changed` alone.
  /// keep: they are the kept ones from now on.
  virtual double error(model::Matrix changed, const model::Block::Masks& masks, bool keep) = 0;
};

/// A model's blocks one after the other: what a block reads is what the dense blocks before it make of a text.
class BlockWalk {
 public:
  BlockWalk() = default;
  virtual ~BlockWalk() = default;
  BlockWalk(const BlockWalk&) = delete;
  BlockWalk& operator=(const BlockWalk&) = delete;

  /// ids: all windows, each from position 0.
  virtual void begin(std::span<const int32_t> ids) = 0;
  /// The first block, then the one after; valid until the next call.
  virtual BlockTrials& next() = 0;
};

class CpuTrials final : public BlockTrials {
 public:
  /// x: [block.tokens(), n_embd]; both outlive this. The first dense_prefix tokens of a window are never masked.
  CpuTrials(model::Block& block, const float* x, int64_t dense_prefix);

  bool has(model::Matrix matrix) const override { return block_.has(matrix); }
  int64_t weight_bytes(model::Matrix matrix) const override { return block_.weight_bytes(matrix); }
  void restart() override { kept_ = dense_; }
  double error(model::Matrix changed, const model::Block::Masks& masks, bool keep) override;
  const std::vector<float>& dense_output() const { return dense_.out; }

 private:
  model::Block& block_;
  const float* x_;
  int64_t dense_prefix_;
  model::Block::Pass dense_, kept_, trial_;
  double scale_ = 0;
};

}  // namespace lacuna::calibrate
