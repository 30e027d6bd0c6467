#include "model/cuda_decoder.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/prepared.h"
#include "kernels/cuda/rows.h"
#include "model/binder.h"

namespace lacuna::model {
namespace {

using kernels::WeightView;

int64_t padded(int64_t N) { return (N + 255) / 256 * 256; }

/// Bytes of `parts` on the device.
int64_t prepared_bytes(std::span<const WeightView> parts) {
  int64_t bytes = 0;
  for (const WeightView& part : parts) {
    if (part.layout->zigzag) {
      const cuda::ColumnForm& form = cuda::column_form(*part.layout);
      bytes += padded(part.shape.N) * part.shape.K / 256 * (form.code_bytes + form.header_bytes);
    } else if (cuda::is_group_layout(*part.layout)) {
      bytes += cuda::most_group_bytes(part);
    } else {
      bytes += part.shape.N * cuda::row_places(*part.layout, part.shape.K, part.params).row_bytes;
    }
    bytes += padded(part.shape.N) * int64_t(sizeof(float));  // scales of batches
  }
  return bytes;
}

/// What next() leaves to the device.
constexpr int64_t kMostCandidates = 2048, kMostVocabulary = int64_t{1} << 20;

/// Tokens that run at once; fewer than the least run one by one: on an H200 a small batch takes as long as 5 to 7.
constexpr int64_t kMostBatch = 512, kLeastBatch = 8;
/// Weights that are f16 at a time (the largest group of a 7B model fits), and logits that wait for the host.
constexpr int64_t kMostWeightBytes = int64_t{192} << 20, kMostLogitBytes = int64_t{128} << 20;

/// Work space of a batch, in bytes.
struct BatchSpace {
  int64_t tokens = 0, logit_tokens = 0;
  int64_t x = 0, attended = 0, qkv = 0, up = 0, logits = 0;  // floats
  int64_t inputs = 0, scales = 0, weights = 0;               // operands

  BatchSpace() = default;
  BatchSpace(const Config& c, int64_t context, int64_t qkv_outputs, int64_t up_outputs) {
    tokens = std::min(kMostBatch, context);
    const auto floats = [&](int64_t rows, int64_t width) {
      return (rows * width * int64_t(sizeof(float)) + 255) / 256 * 256;
    };
    constexpr int64_t kRows = cuda::kOperandRows;
    logit_tokens =
        std::clamp(kMostLogitBytes / (c.n_vocab * int64_t(sizeof(float))) / kRows * kRows, kRows, kMostBatch);
    logit_tokens = std::min(logit_tokens, tokens);
    const int64_t q = c.n_heads * c.head_dim, widest = std::max({c.n_embd, q, c.n_ff});
    x = floats(tokens, c.n_embd);
    attended = floats(tokens, q);
    qkv = floats(tokens, qkv_outputs);
    up = floats(tokens, up_outputs);
    logits = floats(logit_tokens, c.n_vocab);
    inputs = cuda::operand_bytes(tokens, widest);
    scales = floats(1, tokens);
    for (const auto& [N, K] :
         {std::pair{qkv_outputs, c.n_embd}, std::pair{c.n_embd, q}, std::pair{up_outputs, c.n_embd},
          std::pair{c.n_embd, c.n_ff}, std::pair{c.n_vocab, c.n_embd}})
      weights = std::max(weights, cuda::operand_bytes(padded(N), K));
    weights = std::min(weights, std::max(kMostWeightBytes, cuda::operand_bytes(padded(1), widest)));
  }
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
  cuda::GroupsPlan plan;
  int64_t at = 0;
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
  bool skips() const {
    return std::ranges::all_of(runs, [](const ZigzagRun& run) { return run.sparse.skips; });
  }
  /// What an earlier launch writes.
  cuda::Preset to_preset(float* y) const { return adds() ? cuda::Preset{y, outputs, start} : cuda::Preset{}; }
};

/// What the launches of a group that adds() do beside their products.
struct Fused {
  const float* up = nullptr;  // GemvArgs::up; only_adds() groups only
  cuda::Preset clear;         // zeros only, nothing of this group's results; the first run's launch does it
};

struct Layer {
  const float *attn_norm = nullptr, *attn_norm_bias = nullptr, *ffn_norm = nullptr, *ffn_norm_bias = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;
  Group qkv, o, up, down;

  /// In the order of Input.
  std::array<Group*, kInputs> readers() { return {&qkv, &o, &up, &down}; }
  std::array<const Group*, kInputs> readers() const { return {&qkv, &o, &up, &down}; }
};

}  // namespace

/// What a launch is for.
enum class Kind : uint8_t { linear, attention, rest };

/// Where a token's launches change from one kind to another: marks[i] is passed before the launches of kinds[i], the
/// last one after all.
struct Marks {
  std::vector<Kind> kinds;
  std::deque<cuda::Mark> marks;
};

struct CudaDecoder::Impl {
  Config config;
  cuda::Device& device;
  cuda::Stream stream;
  std::deque<cuda::Buffer> buffers;
  int64_t context = 0, position = 0;
  std::optional<SparsityOptions> sparsity;
  int64_t sparse_tokens = 0;

  cuda::Rows embedding;
  Group head;
  const float *output_norm = nullptr, *output_norm_bias = nullptr;
  std::vector<Layer> layers;  // those of the device

  /// The first layers, on the CPU; nullptr: none.
  int64_t cpu_layers = 0;
  std::unique_ptr<Decoder> cpu;
  std::optional<Session> session;
  cuda::Buffer handed;  // what the CPU's layers made of a batch, [tokens, n_embd]: the residual stream from there on

  cuda::Buffer cache, ids, positions, logits, batch_logits, attention_workspace, argmax_workspace;
  cuda::Buffer partial, arrived;  // of products in a fixed order, empty: in any
  cuda::Plans plans;
  std::deque<cuda::Buffer> norms;  // of wina, what the groups point to
  cuda::Buffer counts;             // [layers][kInputs] of inputs left out; empty: not counted
  const float *cos = nullptr, *sin = nullptr;
  // One token's values; *_y: results of a group.
  float *x = nullptr, *h = nullptr, *attended = nullptr, *gated = nullptr, *qkv_y = nullptr, *o_y = nullptr,
        *up_y = nullptr, *down_y = nullptr;
  BatchSpace space;
  /// The same of a batch's tokens; its inputs and weights as operands.
  struct {
    float *x = nullptr, *attended = nullptr, *qkv_y = nullptr, *up_y = nullptr;
    float* scales = nullptr;
    std::byte *inputs = nullptr, *weights[2] = {};
  } batch;
  /// Weights become f16 while the product before runs, in the two work spaces by turns.
  cuda::Stream ahead;
  cuda::Event written[2], read[2];
  int turn = 0;
  bool moved = false;  // the device has not been told the position yet
  std::vector<float> host_logits;
  cuda::Buffer candidates, candidates_workspace, penalized;  // of next(), made when it first needs them
  std::vector<cuda::TopKCandidate> found;
  std::vector<Candidate> chosen;
  std::optional<cuda::Graph> dense_token, sparse_token;
  Marks* marks = nullptr;  // while a token with marks is recorded

  explicit Impl(cuda::Device& d) : device(d), stream(d, true), ahead(d) {}

  cuda::Buffer take(int64_t bytes, const char* what) { return cuda::Buffer(device, bytes, what); }
  const float* upload(std::span<const float> values) {
    if (values.empty()) return nullptr;
    cuda::Buffer& buffer = buffers.emplace_back(take(int64_t(values.size_bytes()), "vectors"));
    buffer.upload(std::as_bytes(values));
    return buffer.as<float>();
  }
  cuda::Rows upload_rows(const WeightView& weights, ThreadPool& pool);
  Group make_group(std::span<const WeightView> parts, ThreadPool& pool);
  ZigzagRun upload_run(std::span<const WeightView> parts, int64_t at, ThreadPool& pool);
  /// scale: Group::scale, whose part for these outputs is filled.
  KeptRun upload_kept(std::span<const WeightView> parts, int64_t at, cuda::Buffer& scale, ThreadPool& pool);
  /// The largest work space of a product in a fixed order: partial sums, and superblock rows.
  std::pair<int64_t, int64_t> fixed_order_space() const;
  void take_workspace(const CudaDecoderOptions& options);

  /// The launches that follow are of this kind.
  void mark(Kind kind);
  /// Runs ids through the CPU's layers, if there are any, and gives the device what they made. sparse: of one id.
  void run_on_cpu(std::span<const int32_t> of, bool sparse);
  /// The launch that begins a token.
  void record_embedding(int64_t M, float* to);
  /// layer: on the device. threshold: of the layer's input; not above 0: dense.
  void run(const Group& group, int64_t layer, Input input, const float* in, float threshold, float* y,
           const Fused& fused = {});
  /// The launches of a token.
  void record(bool sparse);
  void record_sparse();
  /// The plan in use of a run at a share left out.
  cuda::GemvPlan choose_plan(const ZigzagRun& run, int percent) const;
  /// Of sparse tokens; 0: they are dense.
  int percent() const { return sparsity ? std::clamp(int(std::lround(100 * sparsity->thresholds.level)), 1, 99) : 0; }
  /// Milliseconds of a token from position 0 on with the plans as they are.
  double time_token(bool sparse);
  void check_room(std::span<const int32_t> ids, int64_t count) const;
  /// Whether a token that may skip would.
  bool next_is_sparse() const;
  void launch(bool sparse);
  void tell_position();
  /// Runs a token; its logits stay on the device.
  void step(int32_t id, bool may_skip);
  /// Final norm and head of the residual stream `from`, [n_embd].
  void record_head(float* from, const float* add);
  std::span<const float> read_logits();
  /// Runs ids; the last one's logits stay on the device.
  void run_ids(std::span<const int32_t> of);

  cuda::Heads heads_of(const Layer& layer, int64_t index, float* of_qkv);
  /// x [M, K] as an operand; K: of the group.
  cuda::Operand make_inputs(const Group& group, const cuda::GemmInputs& args, int64_t M);
  /// Outputs [first, first + count) of the group's weights, f16, in the work space `to`.
  cuda::Operand make_weights(cuda::Stream& on, const Group& group, int64_t first, int64_t count, std::byte* to);
  /// y[M, N], rows `stride` apart, += or = the group's product.
  void multiply(const Group& group, const cuda::Operand& inputs, int64_t N, bool add, float* y, int64_t stride);
  /// The residual stream of a batch through a norm.
  cuda::GemmInputs normed(const float* weight, const float* bias) const;
  /// Runs tokens at once, dense, as far as the residual stream.
  void run_batch(std::span<const int32_t> of);
  /// Logits of the batch's M tokens.
  void score_batch(int64_t M, const Decoder::LogitsSink& sink);
  /// Runs tokens in batches as they fit, dense, and calls after(first, n) for the n from `first` on: in the residual
  /// stream of the batch, or, where n is 1, with logits.
  void run_batches(std::span<const int32_t> of, const std::function<void(int64_t first, int64_t n)>& after);
};

cuda::Rows CudaDecoder::Impl::upload_rows(const WeightView& weights, ThreadPool& pool) {
  const auto [N, K] = weights.shape;
  HugeBuffer prepared(size_t(N * cuda::row_places(*weights.layout, K, weights.params).row_bytes));
  cuda::prepare_rows(*weights.layout, weights.shape, weights.params, weights.bytes, pool, prepared.data());
  cuda::Buffer& buffer = buffers.emplace_back(take(int64_t(prepared.size()), "weights"));
  buffer.upload(prepared.bytes());
  return {weights.layout, buffer.data(), N, K, weights.params};
}

Group CudaDecoder::Impl::make_group(std::span<const WeightView> parts, ThreadPool& pool) {
  Group group;
  for (const WeightView& part : parts) {
    group.at.push_back(group.outputs);
    group.outputs += padded(part.shape.N);
    group.bytes += int64_t(part.bytes.size());
  }
  std::vector<float> biases;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].bias.empty()) continue;
    biases.resize(size_t(group.outputs));
    std::copy(parts[i].bias.begin(), parts[i].bias.end(), biases.begin() + group.at[i]);
  }
  group.start = upload(biases);
  cuda::Buffer& scale = buffers.emplace_back(take(group.outputs * int64_t(sizeof(float)), "scales"));
  scale.fill(0);
  group.scale = scale.as<float>();
  for (size_t first = 0, end; first < parts.size(); first = end) {
    for (end = first + 1; end < parts.size() && parts[end].layout == parts[first].layout &&
                          parts[end].params.group_size == parts[first].params.group_size;)
      ++end;
    if (parts[first].layout->zigzag) {
      group.runs.push_back(upload_run(parts.subspan(first, end - first), group.at[first], pool));
      const ZigzagRun& run = group.runs.back();
      cuda::launch_weight_scales(device, stream, *run.layout, run.columns, group.scale + run.at);
      continue;
    }
    if (cuda::is_group_layout(*parts[first].layout)) {
      group.kept.push_back(upload_kept(parts.subspan(first, end - first), group.at[first], scale, pool));
      continue;
    }
    for (size_t i = first; i < end; ++i) {
      const float* const bias = parts[i].bias.empty() ? nullptr : group.start + group.at[i];
      group.rows.push_back({upload_rows(parts[i], pool), bias, group.at[i]});
      cuda::launch_weight_scales(device, stream, group.rows.back().weights, group.scale + group.at[i]);
    }
  }
  return group;
}

ZigzagRun CudaDecoder::Impl::upload_run(std::span<const WeightView> parts, int64_t at, ThreadPool& pool) {
  const cuda::PreparedGroup prepared = cuda::prepare_group(parts, pool);
  cuda::Buffer& buffer = buffers.emplace_back(take(prepared.bytes() + 256, "weights"));
  const auto headers_at = int64_t(prepared.codes.size() + 255) / 256 * 256;
  buffer.upload(prepared.codes.bytes());
  buffer.upload(prepared.headers.bytes(), headers_at);
  const cuda::Columns columns = {buffer.data(), buffer.data() + headers_at, prepared.rows, prepared.K};
  ZigzagRun run = {prepared.layout, columns, {}, {}, at};
  run.dense = choose_plan(run, 0);
  run.sparse = choose_plan(run, 50);
  return run;
}

KeptRun CudaDecoder::Impl::upload_kept(std::span<const WeightView> parts, int64_t at, cuda::Buffer& scale,
                                       ThreadPool& pool) {
  const cuda::PreparedGroups prepared = cuda::prepare_groups(parts, pool);
  cuda::Buffer& buffer = buffers.emplace_back(take(cuda::laid_out_bytes(prepared), "weights"));
  KeptRun run = {prepared.layout, {}, {}, at};
  run.groups = cuda::lay_out(prepared, buffer.data(),
                             [&](int64_t to, std::span<const std::byte> bytes) { buffer.upload(bytes, to); });
  scale.upload(std::as_bytes(std::span(prepared.scale)), at * int64_t(sizeof(float)));
  run.plan = cuda::default_plan(device.info(), *run.layout, run.groups);
  return run;
}

cuda::GemvPlan CudaDecoder::Impl::choose_plan(const ZigzagRun& run, int left_out) const {
  if (const cuda::GemvPlan* plan = plans.find({run.layout->id, run.columns.rows, run.columns.K, left_out}))
    return *plan;
  return cuda::default_plan(device.info(), *run.layout, run.columns,
                            left_out > 0 ? cuda::Inputs::threshold : cuda::Inputs::dense);
}

std::pair<int64_t, int64_t> CudaDecoder::Impl::fixed_order_space() const {
  int64_t sums = 1, rows = 1;
  for (const Layer& layer : layers)
    for (const Group* group : layer.readers())
      for (const ZigzagRun& run : group->runs) {
        rows = std::max(rows, run.columns.rows);
        sums = std::max(sums, run.columns.rows * 256 * std::max(run.dense.segments, run.sparse.segments));
      }
  for (const Layer& layer : layers)
    for (const Group* group : layer.readers())
      for (const KeptRun& run : group->kept) {
        rows = std::max(rows, run.groups.panels);
        sums = std::max(sums, cuda::groups_partial_bytes(run.groups, run.plan.blocks) / int64_t(sizeof(float)));
      }
  return {sums, rows};
}

void CudaDecoder::Impl::take_workspace(const CudaDecoderOptions& options) {
  const Config& c = config;
  const int64_t kv_values = c.n_kv_heads * context * c.head_dim, half = c.rope.n_rot / 2;
  cache = take(2 * int64_t(layers.size()) * kv_values * int64_t(sizeof(f16)), "key-value cache");
  space = BatchSpace(c, context, layers.front().qkv.outputs, layers.front().up.outputs);
  ids = take(space.tokens * int64_t(sizeof(int32_t)), "tokens");
  positions = take(sizeof(int32_t), "position");
  logits = take(c.n_vocab * int64_t(sizeof(float)), "logits");
  attention_workspace =
      take(cuda::attention_workspace_bytes(device, 1, c.n_heads, c.n_kv_heads, c.head_dim), "attention");
  argmax_workspace = take(cuda::argmax_workspace_bytes(1), "choice of a token");
  attention_workspace.fill(0);
  argmax_workspace.fill(0);
  ids.fill(0);
  positions.fill(0);

  if (options.deterministic) {
    const auto [sums, rows] = fixed_order_space();
    partial = take(sums * int64_t(sizeof(float)), "partial sums");
    arrived = take(rows * int64_t(sizeof(uint32_t)), "counters");
    arrived.fill(0);
  }

  std::vector<float> tables(size_t(2 * context * half));
  for (int64_t p = 0; p < context; ++p)
    rotary_row(c.rope, p, tables.data() + p * half, tables.data() + (context + p) * half);
  cos = upload(tables);
  sin = cos + context * half;

  const Layer& layer = layers.front();
  const std::array<std::pair<float**, int64_t>, 8> parts = {{{&x, c.n_embd},
                                                             {&h, c.n_embd},
                                                             {&attended, c.n_heads * c.head_dim},
                                                             {&gated, c.n_ff},
                                                             {&qkv_y, layer.qkv.outputs},
                                                             {&o_y, layer.o.outputs},
                                                             {&up_y, layer.up.outputs},
                                                             {&down_y, layer.down.outputs}}};
  int64_t total = 0;
  for (const auto& [pointer, floats] : parts) total += padded(floats);
  cuda::Buffer& buffer = buffers.emplace_back(take(total * int64_t(sizeof(float)), "work space"));
  buffer.fill(0);
  float* next = buffer.as<float>();
  for (const auto& [pointer, floats] : parts) *pointer = std::exchange(next, next + padded(floats));

  cuda::Buffer& of_batch = buffers.emplace_back(take(space.bytes() - space.logits, "work space of a batch"));
  of_batch.fill(0);
  batch_logits = take(space.logits, "logits of a batch");
  if (cpu) handed = take(space.x, "results of the CPU's layers");
  std::byte* at = of_batch.data();
  const auto part = [&](auto*& pointer, int64_t bytes) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(std::exchange(at, at + bytes));
  };
  part(batch.weights[0], space.weights);
  part(batch.weights[1], space.weights);
  part(batch.inputs, space.inputs);
  part(batch.scales, space.scales);
  part(batch.x, space.x);
  part(batch.attended, space.attended);
  part(batch.qkv_y, space.qkv);
  part(batch.up_y, space.up);
  if (cpu) x = batch.x = handed.as<float>();
}

void CudaDecoder::Impl::mark(Kind kind) {
  if (marks == nullptr || (!marks->kinds.empty() && marks->kinds.back() == kind)) return;
  marks->kinds.push_back(kind);
  marks->marks.emplace_back().record(stream);
}

void CudaDecoder::Impl::run_on_cpu(std::span<const int32_t> of, bool sparse) {
  if (!cpu) return;
  session->truncate(position);
  handed.upload(std::as_bytes(cpu->run_first(*session, of, sparse)));
}

void CudaDecoder::Impl::record_embedding(int64_t M, float* to) {
  if (!cpu) cuda::launch_embed(device, stream, embedding, ids.as<int32_t>(), M, to);
}

void CudaDecoder::Impl::run(const Group& group, int64_t layer, Input input, const float* in, float threshold, float* y,
                            const Fused& fused) {
  if (threshold > 0 && counts.bytes() > 0) {
    mark(Kind::rest);
    const int64_t width = input_widths(config)[size_t(input)];
    cuda::launch_count_inactive(device, stream, in, width, group.norms, threshold,
                                counts.as<unsigned long long>() + layer * kInputs + int64_t(input));
  }
  mark(Kind::linear);
  const bool sparse = threshold > 0;
  cuda::Preset clear = fused.clear;
  for (const ZigzagRun& run : group.runs) {
    cuda::GemvArgs args;
    args.weights = run.columns;
    args.inputs = sparse ? cuda::Inputs::threshold : cuda::Inputs::dense;
    args.x = in;
    args.threshold = threshold;
    args.norms = group.norms;
    args.up = fused.up;
    args.zero = clear.data;
    args.zero_count = clear.count;
    args.y = y + run.at;
    if (arrived.bytes() > 0) {  // one work space for all: they follow each other
      args.workspace = {partial.as<float>(), arrived.as<uint32_t>(), group.start ? group.start + run.at : nullptr};
    } else {
      args.has_sibling = &run != &group.runs.back();
      args.is_sibling = &run != &group.runs.front();
    }
    cuda::launch_gemv(device, stream, *run.layout, sparse ? run.sparse : run.dense, args);
    clear = {};
  }
  for (const KeptRun& run : group.kept) {
    cuda::GroupsArgs args;
    args.weights = run.groups;
    args.x = in;
    args.up = fused.up;
    args.threshold = threshold;
    args.norms = group.norms;
    args.y = y + run.at;
    args.zero = clear.data;
    args.zero_count = clear.count;
    if (arrived.bytes() > 0)
      args.workspace = {partial.as<float>(), arrived.as<uint32_t>(), group.start ? group.start + run.at : nullptr};
    cuda::launch_groups(device, stream, *run.layout, run.plan, args);
    clear = {};
  }
  if (group.rows.empty()) return;
  std::array<cuda::RowsPart, 4> parts;
  for (size_t i = 0; i < group.rows.size(); ++i)
    parts[i] = {group.rows[i].weights, group.rows[i].bias, y + group.rows[i].at};
  cuda::launch_rows(device, stream, {{parts.data(), group.rows.size()}, in, threshold});
}

cuda::Heads CudaDecoder::Impl::heads_of(const Layer& layer, int64_t index, float* of_qkv) {
  const Config& c = config;
  const int64_t kv_values = c.n_kv_heads * context * c.head_dim;
  cuda::Heads heads;
  heads.q = of_qkv + layer.qkv.at[0];
  heads.k = of_qkv + layer.qkv.at[1];
  heads.v = of_qkv + layer.qkv.at[2];
  heads.q_stride = heads.kv_stride = layer.qkv.outputs;
  heads.n_heads = c.n_heads;
  heads.n_kv_heads = c.n_kv_heads;
  heads.head_dim = c.head_dim;
  heads.q_norm = layer.q_norm;
  heads.k_norm = layer.k_norm;
  heads.norm_eps = c.norm_eps;
  heads.cos = cos;
  heads.sin = sin;
  heads.n_rot = c.rope.n_rot;
  heads.adjacent = c.rope.adjacent;
  f16* const keys = cache.as<f16>() + 2 * index * kv_values;
  heads.cache = {keys, keys + kv_values, context};
  heads.position = positions.as<int32_t>();
  return heads;
}

void CudaDecoder::Impl::record(bool sparse) {
  const Config& c = config;
  const auto threshold = [&](int64_t layer, Input input) {
    const Group& group = *layers[size_t(layer)].readers()[size_t(input)];
    return sparse && group.skips() ? sparsity->thresholds.t[size_t(cpu_layers + layer)][size_t(input)] : 0.0f;
  };
  mark(Kind::rest);
  record_embedding(1, x);
  for (int64_t index = 0; index < int64_t(layers.size()); ++index) {
    const Layer& layer = layers[size_t(index)];
    mark(Kind::rest);
    cuda::NormArgs norm;
    norm.x = x;
    norm.add = index > 0 ? down_y : nullptr;  // of the layer before
    norm.weight = layer.attn_norm;
    norm.bias = layer.attn_norm_bias;
    norm.eps = c.norm_eps;
    norm.K = c.n_embd;
    norm.y = h;
    norm.preset = layer.qkv.to_preset(qkv_y);
    cuda::launch_norm(device, stream, norm);
    run(layer.qkv, index, Input::attn_in, h, threshold(index, Input::attn_in), qkv_y);

    mark(Kind::attention);
    cuda::AttentionArgs attention;
    attention.heads = heads_of(layer, index, qkv_y);
    attention.heads.q_stride = c.n_heads * c.head_dim;
    attention.heads.kv_stride = c.n_kv_heads * c.head_dim;
    attention.with_heads = true;
    attention.window = c.window;
    attention.scale = 1 / std::sqrt(float(c.head_dim));
    attention.out = attended;
    attention.preset = layer.o.to_preset(o_y);
    attention.workspace = attention_workspace.data();
    cuda::launch_attention(device, stream, attention);
    run(layer.o, index, Input::attn_out, attended, threshold(index, Input::attn_out), o_y);

    mark(Kind::rest);
    norm.add = o_y;
    norm.weight = layer.ffn_norm;
    norm.bias = layer.ffn_norm_bias;
    norm.preset = layer.up.to_preset(up_y);
    cuda::launch_norm(device, stream, norm);
    // The gate is taken where it is read: by products that add. Counts need its result apart.
    const bool gated_there = c.mlp == Mlp::swiglu && layer.up.adds() && layer.down.only_adds() &&
                             layer.down.start == nullptr && counts.bytes() == 0;
    if (gated_there) {
      run(layer.up, index, Input::ffn_in, h, threshold(index, Input::ffn_in), up_y,
          {.up = nullptr, .clear = {down_y, layer.down.outputs, nullptr}});
      run(layer.down, index, Input::ffn_down, up_y, threshold(index, Input::ffn_down), down_y,
          {.up = up_y + layer.up.at[1], .clear = {}});
      continue;
    }
    run(layer.up, index, Input::ffn_in, h, threshold(index, Input::ffn_in), up_y);
    mark(Kind::rest);
    cuda::GateArgs gate;
    gate.gate = c.mlp == Mlp::swiglu ? cuda::Gate::swiglu : cuda::Gate::relu;
    gate.x = up_y;
    gate.up = c.mlp == Mlp::swiglu ? up_y + layer.up.at[1] : nullptr;
    gate.out = gated;
    gate.count = c.n_ff;
    gate.preset = layer.down.to_preset(down_y);
    cuda::launch_gate(device, stream, gate);
    run(layer.down, index, Input::ffn_down, gated, threshold(index, Input::ffn_down), down_y);
  }
  record_head(x, down_y);
  mark(Kind::rest);
  cuda::ArgmaxArgs choice;
  choice.x = logits.as<float>();
  choice.N = c.n_vocab;
  choice.ids = ids.as<int32_t>();
  choice.position = positions.as<int32_t>();
  choice.workspace = argmax_workspace.data();
  cuda::launch_argmax(device, stream, choice);
  if (marks != nullptr) marks->marks.emplace_back().record(stream);
}

void CudaDecoder::Impl::record_head(float* from, const float* add) {
  mark(Kind::rest);
  cuda::NormArgs norm;
  norm.x = from;
  norm.add = add;
  norm.weight = output_norm;
  norm.bias = output_norm_bias;
  norm.eps = config.norm_eps;
  norm.K = config.n_embd;
  norm.y = h;
  cuda::launch_norm(device, stream, norm);
  mark(Kind::linear);
  const cuda::RowsPart part = {head.rows[0].weights, head.rows[0].bias, logits.as<float>()};
  cuda::launch_rows(device, stream, {{&part, 1}, h});
}

void CudaDecoder::Impl::record_sparse() {
  sparse_token.reset();
  if (counts.bytes() > 0) counts.fill(0);
  sparse_tokens = 0;
  if (!sparsity) return;
  try {
    sparse_token.emplace(stream, [&] { record(true); });
  } catch (...) {
    sparsity.reset();  // no graph: dense, and said so
    if (cpu) cpu->set_sparsity(std::nullopt);
    throw;
  }
}

void CudaDecoder::Impl::check_room(std::span<const int32_t> of, int64_t count) const {
  for (const int32_t id : of)
    if (id < 0 || id >= config.n_vocab)
      throw Error("token id {} is outside the model's vocabulary of {}", id, config.n_vocab);
  if (count > context - position)
    throw Error(
        "{} tokens do not fit: the context holds {} and {} are taken; ask for a larger one (the model's limit "
        "is {}) or shorten the text",
        count, context, position, config.n_ctx);
}

bool CudaDecoder::Impl::next_is_sparse() const { return sparse_token && position >= sparsity->dense_prefix; }

void CudaDecoder::Impl::launch(bool sparse) {
  if (!dense_token) throw Error("the decoder has lost its graph to an earlier error; load the model again");
  (sparse ? *sparse_token : *dense_token).launch(stream);
  sparse_tokens += sparse;
  ++position;
}

void CudaDecoder::Impl::tell_position() {
  const auto at = int32_t(position);
  positions.upload(std::as_bytes(std::span(&at, 1)));
  moved = false;
}

void CudaDecoder::Impl::step(int32_t id, bool may_skip) {
  stream.synchronize();
  const bool sparse = may_skip && next_is_sparse();
  run_on_cpu({&id, 1}, sparse);
  if (moved) tell_position();
  ids.upload(std::as_bytes(std::span(&id, 1)));
  launch(sparse);
}

std::span<const float> CudaDecoder::Impl::read_logits() {
  stream.synchronize();
  const auto to = std::span(host_logits).first(size_t(config.n_vocab));
  logits.download(std::as_writable_bytes(to));
  return to;
}

cuda::Operand CudaDecoder::Impl::make_inputs(const Group& group, const cuda::GemmInputs& args, int64_t M) {
  cuda::GemmInputs inputs = args;
  inputs.to = {batch.inputs, batch.scales, M, group.K()};
  cuda::launch_gemm_inputs(device, stream, inputs);
  return inputs.to;
}

cuda::Operand CudaDecoder::Impl::make_weights(cuda::Stream& on, const Group& group, int64_t first, int64_t count,
                                              std::byte* to) {
  const cuda::Operand all = {to, group.scale + first, count, group.K()};
  /// The slice's share of outputs [at, at + N) of the group: from which on, and the operand.
  const auto share = [&](int64_t at, int64_t N) {
    const int64_t begin = std::max(first, at), end = std::min(first + count, at + N);
    cuda::Operand part = all;
    part.rows = std::max(int64_t{0}, end - begin);
    if (part.rows > 0) part.tiles += cuda::operand_bytes(begin - first, all.K), part.scale = group.scale + begin;
    return std::pair{begin - at, part};
  };
  for (const ZigzagRun& run : group.runs) {
    const auto [begin, part] = share(run.at, run.columns.rows * 256);
    if (part.rows > 0) cuda::launch_gemm_weights(device, on, *run.layout, run.columns, begin, part);
  }
  for (const KeptRun& run : group.kept) {
    const auto [begin, part] = share(run.at, run.groups.panels * cuda::kPanelRows);
    if (part.rows > 0) cuda::launch_gemm_weights(device, on, *run.layout, run.groups, begin, part);
  }
  for (const RowPart& row : group.rows) {
    const auto [begin, part] = share(row.at, row.weights.N);
    if (part.rows > 0) cuda::launch_gemm_weights(device, on, row.weights, begin, part);
  }
  return all;
}

void CudaDecoder::Impl::multiply(const Group& group, const cuda::Operand& inputs, int64_t N, bool add, float* y,
                                 int64_t stride) {
  const int64_t at_once = space.weights / cuda::operand_bytes(padded(1), inputs.K) * padded(1);
  for (int64_t first = 0; first < N; first += at_once, turn ^= 1) {
    const int64_t count = std::min(at_once, N - first);
    ahead.wait(read[turn]);
    cuda::GemmArgs args;
    args.x = inputs;
    args.w = make_weights(ahead, group, first, count, batch.weights[turn]);
    written[turn].record(ahead);
    stream.wait(written[turn]);
    args.bias = group.start == nullptr ? nullptr : group.start + first;
    args.add = add;
    args.y = y + first;
    args.stride = stride;
    cuda::launch_gemm(device, stream, args);
    read[turn].record(stream);
  }
}

cuda::GemmInputs CudaDecoder::Impl::normed(const float* weight, const float* bias) const {
  return {.x = batch.x, .stride = config.n_embd, .norm = weight, .norm_bias = bias, .eps = config.norm_eps, .to = {}};
}

void CudaDecoder::Impl::run_batch(std::span<const int32_t> of) {
  const Config& c = config;
  const auto M = int64_t(of.size());
  stream.synchronize();
  run_on_cpu(of, false);
  ids.upload(std::as_bytes(of));
  tell_position();
  record_embedding(M, batch.x);
  cuda::GemmInputs inputs;
  for (int64_t index = 0; index < int64_t(layers.size()); ++index) {
    const Layer& layer = layers[size_t(index)];
    inputs = normed(layer.attn_norm, layer.attn_norm_bias);
    multiply(layer.qkv, make_inputs(layer.qkv, inputs, M), layer.qkv.outputs, false, batch.qkv_y, layer.qkv.outputs);

    cuda::BatchAttentionArgs attention;
    attention.heads = heads_of(layer, index, batch.qkv_y);
    attention.heads.M = M;
    attention.window = c.window;
    attention.scale = 1 / std::sqrt(float(c.head_dim));
    attention.out = batch.attended;
    attention.out_stride = c.n_heads * c.head_dim;
    cuda::launch_heads(device, stream, attention.heads);
    cuda::launch_batch_attention(device, stream, attention);
    inputs = {.x = batch.attended, .stride = attention.out_stride, .to = {}};
    multiply(layer.o, make_inputs(layer.o, inputs, M), c.n_embd, true, batch.x, c.n_embd);

    inputs = normed(layer.ffn_norm, layer.ffn_norm_bias);
    multiply(layer.up, make_inputs(layer.up, inputs, M), layer.up.outputs, false, batch.up_y, layer.up.outputs);
    const bool swiglu = c.mlp == Mlp::swiglu;
    inputs = {.gate = swiglu ? cuda::Gate::swiglu : cuda::Gate::relu,
              .x = batch.up_y,
              .up = swiglu ? batch.up_y + layer.up.at[1] : nullptr,
              .stride = layer.up.outputs,
              .to = {}};
    multiply(layer.down, make_inputs(layer.down, inputs, M), c.n_embd, true, batch.x, c.n_embd);
  }
  position += M;
  moved = true;
}

void CudaDecoder::Impl::score_batch(int64_t M, const Decoder::LogitsSink& sink) {
  const cuda::Operand inputs = make_inputs(head, normed(output_norm, output_norm_bias), M);
  host_logits.resize(size_t(std::min(M, space.logit_tokens) * config.n_vocab));
  for (int64_t first = 0; first < M; first += space.logit_tokens) {
    cuda::Operand part = inputs;  // whole tiles
    part.tiles += cuda::operand_bytes(first, inputs.K);
    part.scale += first;
    part.rows = std::min(space.logit_tokens, M - first);
    multiply(head, part, config.n_vocab, false, batch_logits.as<float>(), config.n_vocab);
    stream.synchronize();
    const auto to = std::as_writable_bytes(std::span(host_logits).first(size_t(part.rows * config.n_vocab)));
    batch_logits.download(to);
    sink(first, part.rows, host_logits.data());
  }
}

void CudaDecoder::Impl::run_batches(std::span<const int32_t> of,
                                    const std::function<void(int64_t first, int64_t n)>& after) {
  for (int64_t first = 0, left = int64_t(of.size()); left > 0;) {
    const int64_t n = left < kLeastBatch ? 1 : std::min(left, space.tokens);
    if (n > 1)
      run_batch(of.subspan(size_t(first), size_t(n)));
    else
      step(of[size_t(first)], false);
    after(first, n);
    first += n;
    left -= n;
  }
}

CudaDecoder::CudaDecoder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaDecoder::~CudaDecoder() {
  try {
    impl_->stream.synchronize();
  } catch (...) {  // nothing more can be done with the device
  }
}

std::unique_ptr<CudaDecoder> CudaDecoder::load(const io::Checkpoint& checkpoint, ThreadPool& pool, cuda::Device& device,
                                               const CudaDecoderOptions& options) {
  auto impl = std::make_unique<Impl>(device);
  Impl& d = *impl;
  d.config = read_config(checkpoint);
  const Config& c = d.config;
  const auto refuse = [&](const char* what) { throw Error("--device cuda: {}: {}", checkpoint.path(), what); };
  if (c.positions != Positions::rope) refuse("learned positions do not run on CUDA yet");
  if (!c.norm_first) refuse("norms after their half blocks do not run on CUDA yet");
  if (c.head_dim % 8 != 0 || c.head_dim > 256) refuse("heads must have a multiple of 8 and at most 256 values on CUDA");
  if (!options.deterministic) d.plans = options.plans;
  d.context = options.context > 0 ? options.context : c.n_ctx;
  if (d.context > c.n_ctx)
    throw Error("a context of {} tokens was asked for; this model takes 1 to {}", d.context, c.n_ctx);
  if (options.gpu_layers < 0 || options.gpu_layers > c.n_layers)
    throw Error("{} layers on the device were asked for; this model has {}", options.gpu_layers, c.n_layers);
  d.cpu_layers = options.gpu_layers > 0 ? c.n_layers - options.gpu_layers : 0;

  std::deque<std::vector<float>> biases;
  Binder binder(checkpoint, biases);
  const int64_t q = c.n_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
  const bool gated = c.mlp == Mlp::swiglu;
  const io::Tensor& words = binder.matrix("token_embd.weight", c.n_vocab, c.n_embd);
  binder.ignore("rope_freqs.weight");  // read by the configuration
  using Parts = std::vector<WeightView>;
  std::vector<std::array<Parts, 4>> groups;
  for (int64_t index = 0; index < c.n_layers; ++index) {
    const auto name = [&](const char* part) { return fmt::format("blk.{}.{}", index, part); };
    Parts up;
    if (gated) up.push_back(binder.weight(name("ffn_gate"), c.n_ff, c.n_embd));
    up.push_back(binder.weight(name("ffn_up"), c.n_ff, c.n_embd));
    groups.push_back({Parts{binder.weight(name("attn_q"), q, c.n_embd), binder.weight(name("attn_k"), kv, c.n_embd),
                            binder.weight(name("attn_v"), kv, c.n_embd)},
                      Parts{binder.weight(name("attn_output"), c.n_embd, q)}, std::move(up),
                      Parts{binder.weight(name("ffn_down"), c.n_embd, c.n_ff)}});
  }
  WeightView output{words.name, words.layout, words.shape, words.bytes, {}, words.params};
  const bool tied = !binder.has("output.weight");
  const WeightView embedding = output;
  if (!tied) output = binder.weight("output", c.n_vocab, c.n_embd);

  // Before anything is uploaded: does it run, does it fit?
  for (const WeightView* table : {&embedding, &std::as_const(output)})
    if (table->layout->zigzag || cuda::is_group_layout(*table->layout))
      throw Error("--device cuda: {}: is {}; embedding and head must be in a row layout", table->name,
                  table->layout->name);
  const bool embeds = d.cpu_layers == 0 && !tied;
  const int64_t tables = prepared_bytes({&output, 1}) + (embeds ? prepared_bytes({&embedding, 1}) : 0);
  std::vector<int64_t> layer_bytes;  // weights and cache
  const int64_t cache_bytes = 2 * kv * d.context * int64_t(sizeof(f16));
  for (const auto& layer : groups) {
    layer_bytes.push_back(cache_bytes);
    for (const Parts& parts : layer) layer_bytes.back() += prepared_bytes(parts);
  }
  const int64_t n_layers = c.n_layers - d.cpu_layers, cache = n_layers * cache_bytes;
  const int64_t weights =
      tables - cache + std::accumulate(layer_bytes.begin() + d.cpu_layers, layer_bytes.end(), int64_t{0});
  const auto outputs = [](const Parts& parts) {
    int64_t sum = 0;
    for (const WeightView& part : parts) sum += padded(part.shape.N);
    return sum;
  };
  const BatchSpace space(c, d.context, outputs(groups[0][0]), outputs(groups[0][2]));
  const int64_t rest = (c.n_vocab + d.context * c.rope.n_rot) * int64_t(sizeof(float)) + (int64_t{64} << 20) +
                       space.bytes() + (d.cpu_layers > 0 ? space.x : 0);
  try {
    device.require(weights + cache + rest,
                   fmt::format("{}: {} MB of weights, {} MB of key-value cache for {} tokens and {} MB of work space",
                               checkpoint.path(), weights >> 20, cache >> 20, d.context, rest >> 20));
  } catch (cuda::DoesNotFit& error) {
    int64_t left = device.free_bytes() - prepared_bytes({&output, 1}) - rest - space.x;
    for (auto bytes = layer_bytes.rbegin(); error.layers + 1 < c.n_layers && left >= *bytes; ++bytes, ++error.layers)
      left -= *bytes;
    throw;
  }

  std::optional<Progress> progress;
  if (d.cpu_layers > 0) {
    LoadOptions first = options.cpu;
    first.first_layers = d.cpu_layers;
    first.progress = options.progress;
    first.deterministic = options.deterministic;
    d.cpu = Decoder::load(checkpoint, pool, first);
    d.session.emplace(*d.cpu, d.context);
  }
  if (options.progress) progress.emplace("Uploading", n_layers + 1, "layers");
  d.head = d.make_group({&output, 1}, pool);
  if (embeds)
    d.embedding = d.upload_rows(embedding, pool);
  else
    d.embedding = d.head.rows[0].weights;  // tied, or not used
  const auto norm = [&](const std::string& name, const float*& weight, const float*& bias) {
    const NormWeights values = binder.norm(name, c);
    weight = d.upload(values.weight);
    bias = d.upload(values.bias);
  };
  for (int64_t index = 0; index < c.n_layers; ++index) {
    const auto name = [&](const char* part) { return fmt::format("blk.{}.{}", index, part); };
    if (index < d.cpu_layers) {  // the CPU's decoder has read these
      for (const char* part : {"attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"})
        for (const char* end : {".weight", ".bias"}) binder.ignore(name(part) + end);
      continue;
    }
    Layer& layer = d.layers.emplace_back();
    norm(name("attn_norm"), layer.attn_norm, layer.attn_norm_bias);
    norm(name("ffn_norm"), layer.ffn_norm, layer.ffn_norm_bias);
    if (c.qk_norm) {
      layer.q_norm = d.upload(binder.vector(name("attn_q_norm.weight"), c.head_dim));
      layer.k_norm = d.upload(binder.vector(name("attn_k_norm.weight"), c.head_dim));
    }
    const auto& parts = groups[size_t(index)];
    layer.qkv = d.make_group(parts[0], pool);
    layer.o = d.make_group(parts[1], pool);
    layer.up = d.make_group(parts[2], pool);
    layer.down = d.make_group(parts[3], pool);
    if (progress) progress->add(1);
  }
  norm("output_norm", d.output_norm, d.output_norm_bias);
  binder.check_all_used();
  d.take_workspace(options);
  d.host_logits.resize(size_t(c.n_vocab));
  d.dense_token.emplace(d.stream, [&] { d.record(false); });
  return std::unique_ptr<CudaDecoder>(new CudaDecoder(std::move(impl)));
}

const Config& CudaDecoder::config() const { return impl_->config; }
int64_t CudaDecoder::length() const { return impl_->position; }
int64_t CudaDecoder::capacity() const { return impl_->context; }

double CudaDecoder::measure_read_gb_s() { return cuda::measure_read_gb_s(impl_->device); }

std::string CudaDecoder::explain() const {
  const Impl& d = *impl_;
  std::string out;
  const auto add = [&](const char* name, const Group& group) {
    std::string how;
    for (const ZigzagRun& run : group.runs)
      how += fmt::format("{}{}, dense {}{}", how.empty() ? "" : "; then ", run.layout->name, cuda::describe(run.dense),
                         d.sparsity ? fmt::format(", at {}% {}{}", d.percent(), run.sparse.skips ? "sparse " : "",
                                                  cuda::describe(run.sparse))
                                    : "");
    for (const KeptRun& run : group.kept)
      how += fmt::format("{}{} with groups of {}, {}", how.empty() ? "" : "; then ", run.layout->name, run.groups.group,
                         cuda::describe(run.plan));
    std::string rows;
    for (const RowPart& part : group.rows)
      rows += fmt::format("{}{}", rows.empty() ? "" : ", ", part.weights.layout->name);
    if (!rows.empty()) how += fmt::format("{}{}, in rows", how.empty() ? "" : "; then ", rows);
    out += fmt::format("{}: {}\n", name, how);
  };
  if (d.cpu)
    out += fmt::format("layers 0 to {} on the CPU:\n{}the others on the device:\n", d.cpu_layers - 1, d.cpu->explain());
  const Layer& layer = d.layers.front();
  add("attn_q, attn_k, attn_v", layer.qkv);
  add("attn_output", layer.o);
  add(d.config.mlp == Mlp::swiglu ? "ffn_gate, ffn_up" : "ffn_up", layer.up);
  add("ffn_down", layer.down);
  return out + fmt::format("output: {}, in rows\n", d.head.rows[0].weights.layout->name);
}

int64_t CudaDecoder::cpu_layers() const { return impl_->cpu_layers; }

int64_t CudaDecoder::weight_bytes() const {
  int64_t bytes = impl_->head.bytes + (impl_->cpu ? impl_->cpu->weight_bytes() : 0);
  for (const Layer& layer : impl_->layers) bytes += layer.qkv.bytes + layer.o.bytes + layer.up.bytes + layer.down.bytes;
  return bytes;
}

void CudaDecoder::truncate(int64_t length) {
  Impl& d = *impl_;
  if (length < 0 || length > d.position) throw Error("cannot truncate {} tokens to {}", d.position, length);
  d.stream.synchronize();
  d.position = length;
  d.tell_position();
}

void CudaDecoder::append(std::span<const int32_t> ids) {
  Impl& d = *impl_;
  d.check_room(ids, int64_t(ids.size()));
  if (!d.sparsity || !d.sparsity->mask_batches) return d.run_batches(ids, [](int64_t, int64_t) {});
  for (const int32_t id : ids) d.step(id, true);
}

void CudaDecoder::Impl::run_ids(std::span<const int32_t> of) {
  check_room(of, int64_t(of.size()));
  if (of.size() == 1 || (sparsity && sparsity->mask_batches)) {
    for (const int32_t id : of) step(id, true);
    return;
  }
  const auto count = int64_t(of.size());
  run_batches(of, [&](int64_t first, int64_t n) {
    if (n > 1 && first + n == count) record_head(batch.x + (n - 1) * config.n_embd, nullptr);
  });
}

std::span<const float> CudaDecoder::forward(std::span<const int32_t> ids) {
  impl_->run_ids(ids);
  return impl_->read_logits();
}

int32_t CudaDecoder::next(std::span<const int32_t> ids, Sampler& sampler) {
  Impl& d = *impl_;
  const int64_t N = d.config.n_vocab, k = std::min(sampler.wanted(), N);
  if (k < 1 || k > kMostCandidates || N > kMostVocabulary) return Engine::next(ids, sampler);
  const auto at_least = [&](cuda::Buffer& buffer, int64_t bytes, const char* what) {
    if (buffer.bytes() >= bytes) return false;
    buffer = d.take(bytes, what);
    return true;
  };
  const std::span<const int32_t> penalized = sampler.penalized();
  if (!penalized.empty())  // their number grows with every token: few allocations
    at_least(d.penalized, int64_t(std::bit_ceil(penalized.size_bytes())), "penalized tokens");
  at_least(d.candidates, (k + 1) * int64_t(sizeof(cuda::TopKCandidate)), "candidates");
  if (at_least(d.candidates_workspace, cuda::top_k_workspace_bytes(N, k), "choice of candidates"))
    d.candidates_workspace.upload(std::as_bytes(std::span(&cuda::kNoBadValue, 1)));

  d.run_ids(ids);
  if (!penalized.empty()) d.penalized.upload(std::as_bytes(penalized));
  cuda::TopKArgs args;
  args.x = d.logits.as<float>();
  args.N = N;
  args.k = int(k);
  args.penalized = d.penalized.as<int32_t>();
  args.n_penalized = int64_t(penalized.size());
  args.penalty = sampler.repeat_penalty();
  args.out = d.candidates.as<cuda::TopKCandidate>();
  args.workspace = d.candidates_workspace.data();
  cuda::launch_top_k(d.device, d.stream, args);
  d.found.resize(size_t(k + 1));
  d.candidates.download(std::as_writable_bytes(std::span(d.found)));
  if (d.found.back().id >= 0) return sampler.sample(d.read_logits());  // throws
  d.chosen.clear();
  for (const cuda::TopKCandidate& c : std::span(d.found).first(size_t(k))) d.chosen.push_back({c.logit, c.id});
  return sampler.choose(d.chosen);
}

void CudaDecoder::score(std::span<const int32_t> ids, const Decoder::LogitsSink& sink) {
  Impl& d = *impl_;
  d.check_room(ids, int64_t(ids.size()));
  if (d.sparsity) {
    for (size_t i = 0; i < ids.size(); ++i) {
      d.step(ids[i], true);
      sink(int64_t(i), 1, d.read_logits().data());
    }
    return;
  }
  d.run_batches(ids, [&](int64_t first, int64_t n) {
    if (n == 1)
      sink(first, 1, d.read_logits().data());
    else
      d.score_batch(n, [&](int64_t at, int64_t count, const float* logits) { sink(first + at, count, logits); });
  });
}

void CudaDecoder::set_sparsity(std::optional<SparsityOptions> options) {
  Impl& d = *impl_;
  if (options) check_sparsity(*options, d.config);
  if (options && options->thresholds.group > 1)
    throw Error(
        "--device cuda: the thresholds are of groups of {} inputs, which run on the CPU; calibrate without --group",
        options->thresholds.group);
  const bool by_norms = options && !options->thresholds.norms.empty();
  if (by_norms)
    for (const Layer& layer : d.layers)
      for (const Group* group : layer.readers())
        if (!group->only_adds())
          throw Error(
              "--device cuda: thresholds by wina need zigzag or group-sparse weights; use --criterion magnitude");
  std::deque<cuda::Buffer> norms;  // [layers on the device][kInputs]
  if (by_norms)
    for (size_t l = size_t(d.cpu_layers); l < options->thresholds.norms.size(); ++l)
      for (const std::vector<float>& values : options->thresholds.norms[l]) {
        cuda::Buffer& buffer = norms.emplace_back(d.device, int64_t(values.size() * sizeof(float)), "column norms");
        buffer.upload(std::as_bytes(std::span(values)));
      }
  d.stream.synchronize();
  d.sparse_token.reset();  // before the norms that it reads go
  d.norms = std::move(norms);
  for (size_t l = 0; l < d.layers.size(); ++l)
    for (size_t i = 0; Group * group : d.layers[l].readers())
      group->norms = by_norms ? d.norms[l * kInputs + i++].as<float>() : nullptr;
  if (d.cpu) {
    std::optional<SparsityOptions> first = options;
    if (first) first->mask_batches = false;  // tokens that are masked come one by one
    d.cpu->set_sparsity(std::move(first));
  }
  d.sparsity = std::move(options);
  if (d.sparsity)
    for (Layer& layer : d.layers)
      for (Group* const group : layer.readers())
        for (ZigzagRun& run : group->runs) run.sparse = d.choose_plan(run, d.percent());
  d.record_sparse();
}

std::optional<SparsityOptions> CudaDecoder::sparsity() const {
  const Impl& d = *impl_;
  std::optional<SparsityOptions> out = d.sparsity;
  if (!out) return out;
  for (size_t l = 0; l < size_t(d.cpu_layers); ++l) out->thresholds.t[l] = d.cpu->sparsity()->thresholds.t[l];
  for (size_t l = 0; l < d.layers.size(); ++l)
    for (size_t i = 0; const Group* group : d.layers[l].readers()) {
      float& threshold = out->thresholds.t[size_t(d.cpu_layers) + l][i++];
      if (!group->skips()) threshold = 0;
    }
  return out;
}

double CudaDecoder::Impl::time_token(bool sparse) {
  constexpr int kTokens = 6, kRounds = 2;
  cuda::Graph graph(stream, [&] { record(sparse); });
  cuda::Stopwatch watch;
  double least = 0;
  for (int round = -1; round < kRounds; ++round) {
    stream.synchronize();
    tell_position();  // the device's moves on with each token
    watch.start(stream);
    for (int token = 0; token < kTokens; ++token) graph.launch(stream);
    const double ms = watch.stop_ms(stream) / kTokens;
    if (round == 0 || (round > 0 && ms < least)) least = ms;
  }
  tell_position();
  return least;
}

std::vector<CudaTuning> CudaDecoder::tune(bool progress) {
  Impl& d = *impl_;
  if (d.arrived.bytes() > 0) throw Error("plans are tuned in any order of sums; leave out --deterministic");
  if (d.cpu) throw Error("plans are tuned with the whole model on the device; leave out --gpu-layers");
  if (d.context < kTuneContext)
    throw Error("tuning takes a context of {} tokens, this one holds {}", kTuneContext, d.context);
  truncate(0);
  const int32_t id = 0;
  d.ids.upload(std::as_bytes(std::span(&id, 1)));
  const bool sparse = d.sparsity.has_value();
  std::map<cuda::Product, std::vector<ZigzagRun*>> products;
  for (Layer& layer : d.layers)
    for (Group* const group : layer.readers())
      for (ZigzagRun& run : group->runs)
        products[{run.layout->id, run.columns.rows, run.columns.K, d.percent()}].push_back(&run);
  const auto plan_of = [&](ZigzagRun& run) -> cuda::GemvPlan& { return sparse ? run.sparse : run.dense; };
  const auto set = [&](const std::vector<ZigzagRun*>& runs, const cuda::GemvPlan& plan) {
    for (ZigzagRun* const run : runs) plan_of(*run) = plan;
  };
  const auto inputs = sparse ? cuda::Inputs::threshold : cuda::Inputs::dense;
  const auto standard = [&](const ZigzagRun& run) {
    return cuda::default_plan(d.device.info(), *run.layout, run.columns, inputs);
  };
  for (const auto& [product, runs] : products) set(runs, standard(*runs.front()));

  constexpr double kFills[] = {0.35, 0.5, 0.66, 0.8, 1.0, 1.5}, kNoise = 0.002;
  constexpr float kEarly[] = {0, 0.1f, 0.2f, 0.3f, 0.5f};
  constexpr int kRounds = 2;
  int64_t attempts = 0;
  for (const auto& [product, runs] : products)
    attempts += kRounds * (int64_t(cuda::kernel_plans(*runs.front()->layout).size() * std::size(kFills)) +
                           (sparse ? int64_t(std::size(kEarly)) + 2 : 0));
  std::optional<Progress> bar;
  if (progress) bar.emplace(sparse ? fmt::format("Tuning {}%", d.percent()) : "Tuning dense", attempts, "plans");
  double least = d.time_token(sparse);
  const auto attempt = [&](const std::vector<ZigzagRun*>& runs, const cuda::GemvPlan& plan) {
    if (bar) bar->add(1);
    const cuda::GemvPlan before = plan_of(*runs.front());
    if (plan == before) return;
    set(runs, plan);
    const double ms = d.time_token(sparse);
    if (ms < least * (1 - kNoise))
      least = ms;
    else
      set(runs, before);
  };
  std::map<cuda::Product, cuda::GemvPlan> skipping_plans;
  for (int round = 0; round < kRounds; ++round) {
    for (const auto& [product, runs] : products) {
      const auto best = [&runs = runs, &plan_of] { return plan_of(*runs.front()); };
      cuda::GemvPlan& skipping = skipping_plans[product];  // the best of those that skip
      if (best().skips) skipping = best();
      for (cuda::GemvPlan kernel : cuda::kernel_plans(*runs.front()->layout)) {
        kernel.early_headers = skipping.early_headers, kernel.early_codes = skipping.early_codes;
        for (const double fill : kFills)
          attempt(runs, cuda::filled(d.device.info(), runs.front()->columns, kernel, fill));
      }
      if (!sparse) continue;
      if (!best().skips) {  // nothing is early there
        if (bar) bar->add(int64_t(std::size(kEarly)) + 2);
        continue;
      }
      for (const float codes : kEarly) {
        cuda::GemvPlan plan = best();
        plan.early_headers = 1, plan.early_codes = codes;
        attempt(runs, plan);
      }
      cuda::GemvPlan plan = best();
      plan.early_headers = 0;
      attempt(runs, plan);
      skipping = best();
      cuda::GemvPlan dense = runs.front()->dense;
      dense.skips = false;
      attempt(runs, dense);
    }
  }
  std::vector<CudaTuning> out;
  for (const auto& [product, runs] : products) {
    const cuda::GemvPlan best = plan_of(*runs.front());
    set(runs, standard(*runs.front()));
    CudaTuning& tuning = out.emplace_back(CudaTuning{product, best, d.time_token(sparse), 0});
    set(runs, best);
    tuning.tuned_ms = d.time_token(sparse);
    if (tuning.tuned_ms >= tuning.standard_ms) {  // a lucky measurement
      tuning.plan = standard(*runs.front());
      tuning.tuned_ms = tuning.standard_ms;
      set(runs, tuning.plan);
    }
    d.plans.set(product, tuning.plan);
  }
  if (sparse)
    d.record_sparse();
  else
    d.dense_token.emplace(d.stream, [&] { d.record(false); });
  return out;
}

void CudaDecoder::count_inputs(bool on) {
  Impl& d = *impl_;
  d.stream.synchronize();
  cuda::Buffer made;
  if (on && d.counts.bytes() == 0)
    made = cuda::Buffer(d.device, int64_t(d.layers.size()) * kInputs * int64_t(sizeof(unsigned long long)), "counts");
  d.sparse_token.reset();  // before the counts that it writes go
  if (!on || made.bytes() > 0) d.counts = std::move(made);
  if (d.cpu) d.cpu->clear_counts();
  d.record_sparse();
}

SparsityCounts CudaDecoder::sparsity_counts() const {
  Impl& d = *impl_;
  SparsityCounts out;
  if (d.counts.bytes() == 0) return out;
  d.stream.synchronize();
  std::vector<std::array<unsigned long long, kInputs>> inactive(d.layers.size());
  d.counts.download(std::as_writable_bytes(std::span(inactive)));
  const auto widths = input_widths(d.config);
  if (d.cpu) out = d.cpu->sparsity_counts();
  out.tokens = d.sparse_tokens;
  for (size_t l = 0; l < d.layers.size(); ++l) {
    const Layer& layer = d.layers[l];
    out.bytes.push_back({layer.qkv.bytes, layer.o.bytes, layer.up.bytes, layer.down.bytes});
    auto& counted = out.layers.emplace_back();
    for (size_t i = 0; i < kInputs; ++i) counted[i] = {int64_t(inactive[l][i]), d.sparse_tokens * widths[i]};
  }
  return out;
}

void CudaDecoder::follow(int32_t id, int64_t count) {
  Impl& d = *impl_;
  d.check_room({&id, 1}, count);
  if (count < 1) return;
  if (d.cpu) {
    for (int64_t t = 0; t < count; ++t) {
      d.step(id, true);
      d.stream.synchronize();
      d.ids.download(std::as_writable_bytes(std::span(&id, 1)));
    }
    return;
  }
  d.stream.synchronize();
  if (d.moved) d.tell_position();
  d.ids.upload(std::as_bytes(std::span(&id, 1)));
  for (int64_t t = 0; t < count; ++t) d.launch(d.next_is_sparse());
}

CudaShares CudaDecoder::measure_shares() {
  Impl& d = *impl_;
  if (d.position >= d.context) throw Error("no room for a further token: the context holds {}", d.context);
  d.stream.synchronize();
  Marks marks;
  std::optional<cuda::Graph> token;
  {
    // Not counted: they are none of the sequence's.
    cuda::Buffer counts;
    std::swap(counts, d.counts);
    d.marks = &marks;
    const auto restore = [&] {
      d.marks = nullptr;
      std::swap(counts, d.counts);
    };
    try {
      token.emplace(d.stream, [&] { d.record(d.next_is_sparse()); });
    } catch (...) {
      restore();
      throw;
    }
    restore();
  }
  constexpr int kTokens = 20;
  CudaShares out;
  int32_t id = 0;
  d.ids.download(std::as_writable_bytes(std::span(&id, 1)));
  for (int t = -2; t < kTokens; ++t) {
    d.tell_position();
    d.ids.upload(std::as_bytes(std::span(&id, 1)));
    d.run_on_cpu({&id, 1}, false);  // dense, which is not counted; its time is not asked for
    d.moved = true;
    token->launch(d.stream);
    d.stream.synchronize();
    for (size_t i = 0; t >= 0 && i < marks.kinds.size(); ++i) {
      const double ms = marks.marks[i].ms_to(marks.marks[i + 1]) / kTokens;
      (marks.kinds[i] == Kind::linear      ? out.linear
       : marks.kinds[i] == Kind::attention ? out.attention
                                           : out.rest) += ms;
    }
  }
  d.tell_position();
  return out;
}

void CudaDecoder::wait() { impl_->stream.synchronize(); }

}  // namespace lacuna::model
