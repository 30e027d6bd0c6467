// src/model/decoder.h - a decoder-only transformer on the CPU: llama, mistral, qwen2, qwen3, smollm, opt.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/huge_buffer.h"
#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/linear.h"
#include "kernels/ops.h"
#include "model/config.h"
#include "model/sparsity.h"

namespace lacuna::model {

struct LoadOptions {
  kernels::Prepare prepare = kernels::Prepare::automatic;
  bool progress = true;  // a bar on a terminal
  /// How this machine multiplies each group of zigzag weights; nullptr: the default everywhere. Read while loading.
  const kernels::Plans* plans = nullptr;
  /// Results do not depend on the number of threads: every plan is split by rows.
  bool deterministic = false;
  /// Only this many of the first layers, for run_first(): without output head, other tensors are not looked at. 0: the
  /// whole model.
  int64_t first_layers = 0;
};

/// How a decoder leaves inputs out.
struct SparsityOptions {
  Thresholds thresholds;
  /// Tokens at positions below this are always dense: the first ones are attention sinks, and a prompt is dense anyway.
  int64_t dense_prefix = 4;
  /// Several tokens at once are dense, as decoding runs a prompt; true: each has its own inputs masked, as if the
  /// tokens had come one by one.
  bool mask_batches = false;
  /// One token of each of several sessions runs dense; true: it runs sparse with the inputs that any of them needs.
  bool unite_sessions = false;
};

/// Throws Error when the thresholds are not of this model, or the prefix is negative.
void check_sparsity(const SparsityOptions& options, const Config& config);

/// Inputs seen by the layers since the counts were last cleared, tokens that ran dense not counted.
struct SparsityCounts {
  struct Count {
    int64_t inactive = 0, inputs = 0;
    double share() const { return inputs > 0 ? double(inactive) / double(inputs) : 0; }
  };
  std::vector<std::array<Count, kInputs>> layers;
  InputBytes bytes;
  int64_t tokens = 0;  // that ran sparse
  /// Share of one layer's weight bytes that inactive inputs left unread.
  double layer_share(int64_t layer) const;
  /// The same of all layers.
  double share() const;
};

class Decoder;

/// One sequence: its key-value cache and its length.
class Session {
 public:
  /// capacity: the most tokens it can hold; 0 or more than the model's context is an Error that says so. Memory is
  /// taken as it fills.
  Session(const Decoder& decoder, int64_t capacity, kernels::KvType type = kernels::KvType::f16);
  int64_t length() const { return length_; }
  int64_t capacity() const { return capacity_; }
  int64_t bytes() const { return int64_t(buffer_.size()); }
  /// Forgets everything from position `length` on.
  void truncate(int64_t length);
  /// Becomes the same sequence as `other`, of the same decoder, capacity and type; `same`: the two agree before this
  /// position, so that only what follows is copied. Throws Error when they do not fit.
  void copy(const Session& other, int64_t same);

 private:
  friend class Decoder;
  kernels::KvLayer layer(int64_t index) const;
  HugeBuffer buffer_;
  std::vector<kernels::KvLayer> layers_;
  int64_t length_ = 0, capacity_ = 0;
};

class Decoder {
 public:
  /// Binds, checks shapes, prepares. Throws Error naming the tensor, the expected and the found shape; unknown
  /// architectures list the known ones.
  static std::unique_ptr<Decoder> load(const io::Checkpoint& checkpoint, ThreadPool& pool,
                                       const LoadOptions& options = {});
  ~Decoder();

  const Config& config() const;
  ThreadPool& pool() const;
  int64_t n_layers() const;  // that it has: LoadOptions::first_layers, else all

  /// Called with the logits of tokens [first, first + count) of the call's ids. logits: [count, vocab_size], valid
  /// during the call.
  using LogitsSink = std::function<void(int64_t first, int64_t count, const float* logits)>;
  enum class Want : uint8_t {
    none,    // no logits; the last layer only makes keys and values
    layers,  // no logits, but the last layer runs for every token, so that an observer sees it
    last,
    all,
  };
  /// Runs ids at positions [session.length(), +ids.size()) in batches of at most `batch` tokens and appends them to the
  /// session. Throws Error when they do not fit the session's capacity or an id is outside the vocabulary. No
  /// allocation for a single token.
  void forward(Session& session, std::span<const int32_t> ids, Want want, const LogitsSink& sink);
  /// forward of ids with the last token's logits; the view is valid until the next call.
  std::span<const float> forward(Session& session, std::span<const int32_t> ids);
  /// One token of each session, in one batch: ids[i] goes to sessions[i]; the sessions differ and are equally long.
  /// Returns logits [sessions, n_vocab], valid until the next call. Throws Error as the others do. No allocation.
  static constexpr int64_t kMostSessions = 64;
  std::span<const float> forward(std::span<Session* const> sessions, std::span<const int32_t> ids);

  static constexpr int64_t kMostFirst = 512;
  /// Of a decoder of the first layers: what these make of 1 to kMostFirst ids at positions [session.length(), +ids),
  /// which become part of the session. may_skip: of a single id, as set_sparsity() says; else dense. Returns the
  /// residual stream, [ids, n_embd], valid until the next call. Throws Error as forward() does.
  std::span<const float> run_first(Session& session, std::span<const int32_t> ids, bool may_skip);

  /// From now on tokens leave inactive inputs out; nullopt: dense again. An input of which the calibration left out
  /// less than its plan's dense_below runs dense. Throws Error when the thresholds are not this model's (of all of its
  /// layers). Clears the counts, which are of the layers that it has.
  void set_sparsity(std::optional<SparsityOptions> options);
  /// As set, with threshold 0 where the plan of a layer that it has runs an input dense.
  const std::optional<SparsityOptions>& sparsity() const;
  const SparsityCounts& sparsity_counts() const;
  void clear_counts();

  /// Of a decoder with thresholds: another one for this input, from the next group on (an observer may call it).
  void set_threshold(int64_t layer, Input input, float t);

  /// Sees the inputs of every group before anything is left out. x: [M, K], rows K floats apart, the first at
  /// `position`. Of the last layer's attn_out, ffn_in and ffn_down only the wanted tokens come.
  using Observer =
      std::function<void(int64_t layer, Input input, const float* x, int64_t M, int64_t K, int64_t position)>;
  void set_observer(Observer observer);
  /// What the first layer reads: x: [ids, n_embd], the first id at `position`.
  void embed(std::span<const int32_t> ids, int64_t position, float* x);

  int64_t weight_bytes() const;    // read for one token, output head included
  int64_t prepared_bytes() const;  // copies made by prepare
  std::string explain() const;     // kernel choices, one line a group of the first layer and the head

 private:
  struct Impl;
  explicit Decoder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lacuna::model
