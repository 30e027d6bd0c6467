// src/model/cuda_shard.h - a shard of a decoder on an NVIDIA device: its part of every layer and of the key-value cache
// (tensor_split.h), and the launches of a token and of a batch between what shards exchange. A decoder that is not
// split has one shard, which is all of it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/plans.h"
#include "kernels/cuda/rows.h"
#include "kernels/linear.h"
#include "model/config.h"
#include "model/sparsity.h"
#include "model/tensor_split.h"

namespace lacuna::model {

/// Tokens that run at once; fewer than the least run one by one: on an H200 a small batch takes as long as 5 to 7.
inline constexpr int64_t kMostBatch = 512, kLeastBatch = 8;

/// Outputs of a part of a group, padded to whole superblocks.
constexpr int64_t padded(int64_t N) { return (N + 255) / 256 * 256; }

/// Bytes of `parts` on the device.
int64_t prepared_bytes(std::span<const kernels::WeightView> parts);

/// Work space of a batch, in bytes.
struct BatchSpace {
  int64_t tokens = 0, logit_tokens = 0;
  int64_t x = 0, attended = 0, qkv = 0, up = 0, logits = 0;  // floats
  int64_t inputs = 0, scales = 0, weights = 0;               // operands

  BatchSpace() = default;
  /// config: with the heads and the feed-forward values of the shard; n_vocab: outputs of its part of the head;
  /// most_weight_bytes: CudaDecoderOptions::batch_weight_bytes.
  BatchSpace(const Config& config, int64_t n_vocab, int64_t context, int64_t qkv_outputs, int64_t up_outputs,
             int64_t most_weight_bytes);
  int64_t bytes() const { return x + attended + qkv + up + logits + inputs + scales + 2 * weights; }
};

/// Parts of a group that follow each other in one zigzag layout: one launch.
struct ZigzagRun {
  const layout::Layout* layout = nullptr;
  cuda::Columns columns;
  cuda::GemvPlan dense, sparse;
  int64_t at = 0;  // of its results in the group's
};

/// Parts of a group that follow each other in one group-sparse layout, with one group size: one launch.
struct KeptRun {
  const layout::Layout* layout = nullptr;
  cuda::Groups groups;
  int kept = 100;  // of the groups, in percent
  cuda::GroupsPlan plan;
  int64_t at = 0;

  cuda::GroupsProduct product() const { return {layout->id, groups.panels, groups.K, groups.group, kept}; }
};

/// A part of a group in a row layout.
struct RowPart {
  cuda::Rows weights;
  const float* bias = nullptr;
  int64_t at = 0;
};

/// Weights that read one input. Their results lie one after the other, each part padded to 256. Zigzag runs are
/// launched first, then group-sparse ones, then all row parts together.
struct Group {
  std::vector<ZigzagRun> runs;
  std::vector<KeptRun> kept;
  std::vector<RowPart> rows;
  std::vector<int64_t> at;  // of each part's results
  int64_t outputs = 0;      // padded
  int64_t bytes = 0;        // of canonical weights
  std::vector<int64_t> part_bytes;

  const float* start = nullptr;  // biases of all parts, [outputs], or nullptr
  float* scale = nullptr;        // of the outputs as an operand, [outputs]
  const float* norms = nullptr;  // wina: of the input, [K]

  int64_t K() const {
    if (!runs.empty()) return runs.front().columns.K;
    return kept.empty() ? rows.front().weights.K : kept.front().groups.K;
  }
  /// Launches add to the results of a part at least; of all parts: they can take the gate on the way.
  bool adds() const { return !runs.empty() || !kept.empty(); }
  bool only_adds() const { return rows.empty(); }
  /// False: a plan says dense, which then holds for the whole group, so that an input is left out of all or of none.
  bool skips() const;
  /// What an earlier launch writes.
  cuda::Preset to_preset(float* y) const { return adds() ? cuda::Preset{y, outputs, start} : cuda::Preset{}; }
};

/// What the launches of a group that adds() do beside their products.
struct Fused {
  const float* up = nullptr;  // GemvArgs::up; only_adds() groups only
  cuda::Preset clear;         // zeros only, nothing of this group's results; the first run's launch does it
  /// Multiplied with after this one: the last group-sparse run asks for the first one of it (GroupsArgs::next).
  const Group* next = nullptr;
};

struct Layer {
  const float *attn_norm = nullptr, *attn_norm_bias = nullptr, *ffn_norm = nullptr, *ffn_norm_bias = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;
  Group qkv, o, up, down;

  /// In the order of Input.
  std::array<Group*, kInputs> readers() { return {&qkv, &o, &up, &down}; }
  std::array<const Group*, kInputs> readers() const { return {&qkv, &o, &up, &down}; }
};

/// What a launch is for.
enum class Kind : uint8_t { linear, attention, exchange, rest };

/// Where a token's launches change from one kind to another: marks[i] is passed before the launches of kinds[i], the
/// last one after all.
struct Marks {
  std::vector<Kind> kinds;
  std::deque<cuda::Mark> marks;
};

/// A device with one shard or several, whose launches follow each other, and what they exchange with the others.
struct Card {
  explicit Card(cuda::Device& d) : device(d), stream(d, true), ahead(d) {}

  /// The launches that follow are of this kind.
  void mark(Kind kind);

  cuda::Device& device;
  cuda::Stream stream;
  cuda::Stream ahead;      // weights become f16 while the product before runs
  Marks* marks = nullptr;  // while a token with marks is recorded
  std::optional<cuda::Rows> embedding;

  /// Results of all shards, entry s of shard s: of o and down, of the head; of a half block of a batch.
  cuda::Buffer sums, logits, batch_sums;
  float *o = nullptr, *down = nullptr;  // [shards][sum_stride]
  int64_t sum_stride = 0, logit_stride = 0;
};

/// Inputs of a layer below these are left out; 0: none.
using LayerThresholds = std::array<float, kInputs>;

/// Sees, and may change, what a layer's group reads in a batch: x: [M, K] in device memory.
using BatchObserver = std::function<void(int64_t layer, Input input, float* x, int64_t M, int64_t K)>;

class CudaShard {
 public:
  /// config: of the whole model. plans: outlives the shard.
  CudaShard(const Config& config, const TensorSplit& split, int64_t index, Card& card, const cuda::Plans& plans,
            int64_t context);

  // ---- weights, while loading ----
  cuda::Buffer take(int64_t bytes, const char* what) { return cuda::Buffer(card.device, bytes, what); }
  const float* upload(std::span<const float> values);
  cuda::Rows upload_rows(const kernels::WeightView& weights, ThreadPool& pool);
  Group make_group(std::span<const kernels::WeightView> parts, ThreadPool& pool);
  /// After all weights. from_host: the residual stream begins in `handed`.
  void take_workspace(bool deterministic, bool from_host, int64_t batch_weight_bytes);
  /// The plan in use of a run at a share left out, in percent.
  cuda::GemvPlan choose_plan(const ZigzagRun& run, int left_out) const;
  cuda::GroupsPlan choose_plan(const KeptRun& run) const;

  // ---- a token; `index`: a layer on the device. Launches, which may be recorded ----
  void record_embedding(int64_t M, float* to);
  /// The half block as far as the shard's part of its sum: record_attention leaves card.o, record_mlp card.down, both
  /// to be exchanged. The sum of the half block before is taken on the way.
  void record_attention(int64_t index, const LayerThresholds& thresholds);
  void record_mlp(int64_t index, const LayerThresholds& thresholds);
  /// Final norm and this shard's logits, to be exchanged, of the residual stream `from`, [n_embd]; sums: of the last
  /// half block, or nullptr.
  void record_head(float* from, const float* sums);
  void record_choice();

  // ---- a batch of M tokens, dense but for what an observer leaves out ----
  void batch_attention(int64_t index, int64_t M);
  void batch_mlp(int64_t index, int64_t M);
  /// Adds what the half block's shards made to the residual stream; after the exchange, where there are several.
  void batch_add(int64_t M);
  /// Memory of what an observer sees.
  void reserve_observed();
  /// What an observer may do: `in`, [M, K] of tokens from position `first` on, without what they leave out from
  /// position `dense` on; counted as single tokens are. t not above 0: nothing.
  void mask(int64_t layer, Input input, float* in, int64_t M, int64_t K, float t, int64_t first, int64_t dense);
  /// Entries of card.batch_sums.
  static int64_t batch_stride(int64_t M, int64_t n_embd) { return (M * n_embd + 63) / 64 * 64; }
  cuda::Operand batch_head_inputs(int64_t M);
  /// This shard's logits of inputs [first, first + M) to batch_logits, [M, vocabulary share].
  void batch_head(const cuda::Operand& inputs, int64_t first, int64_t M);

  Config config;  // with the heads and feed-forward values of this shard
  Card& card;
  int64_t index = 0, shards = 1;
  Share vocabulary;  // outputs of this shard's part of the head
  int64_t context = 0;

  std::deque<cuda::Buffer> buffers;
  std::vector<Layer> layers;  // those of the device
  Group head;
  const float *output_norm = nullptr, *output_norm_bias = nullptr;
  cuda::Buffer cache, ids, positions, batch_logits, attention_workspace, argmax_workspace;
  cuda::Buffer partial, arrived;   // of products in a fixed order, empty: in any
  BatchObserver observer;          // of batches; empty: their inputs are not written out
  cuda::Buffer observed;           // [tokens, widest input]
  cuda::Buffer handed;             // what the CPU's layers made of a batch, [tokens, n_embd]: the residual stream
  cuda::Buffer counts;             // [layers][kInputs] of inputs left out; empty: not counted
  std::deque<cuda::Buffer> norms;  // of wina, what the groups point to
  BatchSpace space;
  float* x = nullptr;  // the residual stream of one token
  /// The same of a batch's tokens; its inputs and weights as operands.
  struct {
    float *x = nullptr, *attended = nullptr, *qkv_y = nullptr, *up_y = nullptr;
    float* scales = nullptr;
    std::byte *inputs = nullptr, *weights[2] = {};
  } batch;

 private:
  friend class CudaBlock;  // which runs a layer's parts one by one
  friend class CudaBeams;  // which runs them for a few tokens of different texts
  /// Where inputs left out are counted; nullptr: not here.
  unsigned long long* counter(int64_t layer, Input input) const;
  ZigzagRun upload_run(std::span<const kernels::WeightView> parts, int64_t at, ThreadPool& pool);
  /// scale: Group::scale, whose part for these outputs is filled.
  KeptRun upload_kept(std::span<const kernels::WeightView> parts, int64_t at, cuda::Buffer& scale, ThreadPool& pool);
  /// The largest work space of a product in a fixed order: partial sums, and superblock rows.
  std::pair<int64_t, int64_t> fixed_order_space() const;
  /// threshold: of the layer's input; not above 0: dense.
  void run(const Group& group, int64_t layer, Input input, const float* in, float threshold, float* y,
           const Fused& fused = {});
  cuda::Heads heads_of(const Layer& layer, int64_t layer_index, float* of_qkv);
  /// x [M, K] as an operand; K: of the group.
  cuda::Operand make_inputs(const Group& group, const cuda::GemmInputs& args, int64_t M);
  /// The same of a layer's input, which an observer sees before it is rounded.
  cuda::Operand make_layer_inputs(int64_t layer, Input input, const Group& group, const cuda::GemmInputs& args,
                                  int64_t M);
  /// What make_inputs() rounds: y: [M, K].
  void write_inputs(const cuda::GemmInputs& args, int64_t M, int64_t K, float* y);
  /// Outputs [first, first + count) of the group's weights, f16, in the work space `to`.
  cuda::Operand make_weights(const Group& group, int64_t first, int64_t count, std::byte* to);
  /// y[M, outputs.count], rows `stride` apart, += or = the product of these outputs of the group (of a part from its
  /// first one on).
  void multiply(const Group& group, const cuda::Operand& inputs, Share outputs, bool add, float* y, int64_t stride);
  /// The product of a half block: to the residual stream, or to this shard's entry of what is exchanged.
  void multiply_half_block(const Group& group, const cuda::Operand& inputs, int64_t M);
  /// The norm before a half block of one token, `add` summed first.
  cuda::NormArgs norm_of_token(const float* add, const float* weight, const float* bias) const;
  /// The residual stream of a batch through a norm.
  cuda::GemmInputs normed(const float* weight, const float* bias) const;

  const cuda::Plans& plans_;
  const float *cos_ = nullptr, *sin_ = nullptr;
  // One token's values; *_y: results of a group. o and down: this shard's entries of the card's.
  float *h_ = nullptr, *attended_ = nullptr, *gated_ = nullptr, *qkv_y_ = nullptr, *o_y_ = nullptr, *up_y_ = nullptr,
        *down_y_ = nullptr;
  /// The two work spaces of weights, by turns.
  cuda::Event written_[2], read_[2];
  int turn_ = 0;
};

}  // namespace lacuna::model
