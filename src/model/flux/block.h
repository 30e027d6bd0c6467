// src/model/flux/block.h - the two kinds of blocks of FLUX.1: double blocks with weights of their own for image and
// text (MMDiT, arXiv:2403.03206), and single blocks, in which attention and MLP stand side by side.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "model/flux/binder.h"
#include "model/flux/config.h"
#include "model/flux/embed.h"
#include "model/flux/linear.h"
#include "model/flux/moe.h"
#include "model/flux/part_times.h"

namespace lacuna::model::flux {

/// What a block sees beside the hidden states.
struct Conditions {
  const float* silu_embedding = nullptr;  // [width]: of timestep, guidance and pooled text, through SiLU
  const RopeTable* rope = nullptr;        // of all tokens, text first
  int64_t text_tokens = 0, tokens = 0;    // of all: text, then image
};

/// Memory that all blocks share; grows to the largest number of tokens seen.
struct Workspace {
  Workspace(const Config& config_, ThreadPool& pool_) : config(config_), pool(pool_) {}
  void reserve(int64_t tokens);

  const Config& config;
  ThreadPool& pool;
  PartTimes times;
  const InputObserver* observer = nullptr;                   // of linear layers
  std::vector<float> normed, q, k, v, keys, values, result;  // [tokens, width]
  std::vector<float> inner;                                  // [tokens, width + mlp_width]
};

/// Weights of RMS norms of each head's queries and keys: [head_dim].
struct HeadNorms {
  std::vector<float> q, k;
};

/// Linear, GELU, linear; or experts.
class FeedForward {
 public:
  FeedForward(Binder& binder, const std::string& name, const Config& config, bool experts, bool is_text,
              ThreadPool& pool);
  /// x, y: [M, width].
  void run(Workspace& workspace, const float* x, int64_t M, float* y);

 private:
  bool is_text_;
  Linear up_, down_;
  std::optional<Experts> experts_;
};

class DoubleBlock {
 public:
  DoubleBlock(Binder& binder, int64_t index, const Config& config, ThreadPool& pool);
  /// x: [tokens, width], in place.
  void run(Workspace& workspace, const Conditions& conditions, float* x);

 private:
  struct Stream {
    Linear modulation, qkv, out;
    HeadNorms norms;
    FeedForward feed_forward;
    bool is_text;
  };
  static Stream make_stream(Binder& binder, const std::string& prefix, bool is_text, const Config& config,
                            ThreadPool& pool);
  Stream text_, image_;
};

class SingleBlock {
 public:
  SingleBlock(Binder& binder, int64_t index, const Config& config, ThreadPool& pool);
  /// x: [tokens, width], in place.
  void run(Workspace& workspace, const Conditions& conditions, float* x);

 private:
  Linear modulation_, in_, out_;  // in: q, k, v and, without experts, the MLP's first matrix
  HeadNorms norms_;
  std::optional<Experts> experts_;
};

/// y = (x - mean) / sqrt(var + 1e-6) * (1 + scale) + shift. x, y: [M, width]; scale, shift: [width].
void modulated_norm(Workspace& workspace, const float* x, const float* scale, const float* shift, int64_t M, float* y);

}  // namespace lacuna::model::flux
