#include "model/cuda_decoder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "kernels/cuda/gemv.h"
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
    } else {
      bytes += part.shape.N * cuda::row_places(*part.layout, part.shape.K).row_bytes;
    }
  }
  return bytes;
}

/// Parts of a group that follow each other in one zigzag layout: one launch.
struct ZigzagRun {
  const layout::Layout* layout = nullptr;
  cuda::Columns columns;
  cuda::GemvPlan dense, sparse;
  int64_t at = 0;  // of its results in the group's
};

/// A part of a group in a row layout.
struct RowPart {
  cuda::Rows weights;
  const float* bias = nullptr;
  int64_t at = 0;
};

/// Weights that read one input. Their results lie one after the other, each part padded to 256. Zigzag runs are
/// launched first, then all row parts together.
struct Group {
  std::vector<ZigzagRun> runs;
  std::vector<RowPart> rows;
  std::vector<int64_t> at;  // of each part's results
  int64_t outputs = 0;      // padded
  int64_t bytes = 0;        // of canonical weights

  const float* start = nullptr;  // biases of zigzag parts, [outputs], or nullptr
  const float* norms = nullptr;  // wina: of the input, [K]

  /// No part is in a row layout.
  bool all_zigzag() const { return rows.empty(); }
  /// What an earlier launch writes: zigzag launches add to their results.
  cuda::Preset to_preset(float* y) const { return runs.empty() ? cuda::Preset{} : cuda::Preset{y, outputs, start}; }
};

/// What the launches of a group with a zigzag run do beside their products.
struct Fused {
  const float* up = nullptr;  // GemvArgs::up; all_zigzag() groups only
  cuda::Preset clear;         // zeros only, nothing of this group's results; the first run's launch does it
};

struct Layer {
  const float *attn_norm = nullptr, *attn_norm_bias = nullptr, *ffn_norm = nullptr, *ffn_norm_bias = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;
  Group qkv, o, up, down;
};

}  // namespace

struct CudaDecoder::Impl {
  Config config;
  cuda::Device& device;
  cuda::Stream stream;
  std::deque<cuda::Buffer> buffers;
  int64_t context = 0, position = 0;
  std::optional<SparsityOptions> sparsity;
  int64_t sparse_tokens = 0;

  cuda::Rows embedding, head;
  const float *head_bias = nullptr, *output_norm = nullptr, *output_norm_bias = nullptr;
  std::vector<Layer> layers;
  int64_t head_bytes = 0;

  cuda::Buffer cache, ids, positions, logits, attention_workspace, argmax_workspace;
  std::deque<cuda::Buffer> norms;  // of wina, what the groups point to
  cuda::Buffer counts;             // [layers][kInputs] of inputs left out; empty: not counted
  const float *cos = nullptr, *sin = nullptr;
  // One token's values; *_y: results of a group.
  float *x = nullptr, *h = nullptr, *attended = nullptr, *gated = nullptr, *qkv_y = nullptr, *o_y = nullptr,
        *up_y = nullptr, *down_y = nullptr;
  std::vector<float> host_logits;
  std::optional<cuda::Graph> dense_token, sparse_token;

  explicit Impl(cuda::Device& d) : device(d), stream(d) {}

  cuda::Buffer take(int64_t bytes, const char* what) { return cuda::Buffer(device, bytes, what); }
  const float* upload(std::span<const float> values) {
    if (values.empty()) return nullptr;
    cuda::Buffer& buffer = buffers.emplace_back(take(int64_t(values.size_bytes()), "vectors"));
    buffer.upload(std::as_bytes(values));
    return buffer.as<float>();
  }
  cuda::Rows upload_rows(const layout::Layout& layout, layout::Shape shape, std::span<const std::byte> bytes,
                         ThreadPool& pool);
  Group make_group(std::span<const WeightView> parts, ThreadPool& pool);
  ZigzagRun upload_run(std::span<const WeightView> parts, int64_t at, ThreadPool& pool);
  void take_workspace();

  /// threshold: of the layer's input; not above 0: dense.
  void run(const Group& group, int64_t layer, Input input, const float* in, float threshold, float* y,
           const Fused& fused = {});
  /// The launches of a token.
  void record(bool sparse);
  void record_sparse();
  void check_room(std::span<const int32_t> ids, int64_t count) const;
  void launch(bool may_skip);
  /// Runs a token; its logits stay on the device.
  void step(int32_t id, bool may_skip);
  std::span<const float> read_logits();
};

cuda::Rows CudaDecoder::Impl::upload_rows(const layout::Layout& layout, layout::Shape shape,
                                          std::span<const std::byte> bytes, ThreadPool& pool) {
  HugeBuffer prepared(size_t(shape.N * cuda::row_places(layout, shape.K).row_bytes));
  cuda::prepare_rows(layout, shape, bytes, pool, prepared.data());
  cuda::Buffer& buffer = buffers.emplace_back(take(int64_t(prepared.size()), "weights"));
  buffer.upload(prepared.bytes());
  return {&layout, buffer.data(), shape.N, shape.K};
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
    if (!parts[i].layout->zigzag) {
      group.rows.push_back(
          {upload_rows(*parts[i].layout, parts[i].shape, parts[i].bytes, pool), upload(parts[i].bias), group.at[i]});
    } else if (!parts[i].bias.empty()) {
      biases.resize(size_t(group.outputs));
      std::copy(parts[i].bias.begin(), parts[i].bias.end(), biases.begin() + group.at[i]);
    }
  }
  group.start = upload(biases);
  for (size_t first = 0, end; first < parts.size(); first = end) {
    for (end = first + 1; end < parts.size() && parts[end].layout == parts[first].layout;) ++end;
    if (parts[first].layout->zigzag)
      group.runs.push_back(upload_run(parts.subspan(first, end - first), group.at[first], pool));
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
  const auto plan = [&](cuda::Inputs inputs) {
    return cuda::default_plan(device.info(), *prepared.layout, columns, inputs);
  };
  return {prepared.layout, columns, plan(cuda::Inputs::dense), plan(cuda::Inputs::threshold), at};
}

void CudaDecoder::Impl::take_workspace() {
  const Config& c = config;
  const int64_t kv_values = c.n_kv_heads * context * c.head_dim, half = c.rope.n_rot / 2;
  cache = take(2 * c.n_layers * kv_values * int64_t(sizeof(f16)), "key-value cache");
  ids = take(sizeof(int32_t), "token");
  positions = take(sizeof(int32_t), "position");
  logits = take(c.n_vocab * int64_t(sizeof(float)), "logits");
  attention_workspace =
      take(cuda::attention_workspace_bytes(device, 1, c.n_heads, c.n_kv_heads, c.head_dim), "attention");
  argmax_workspace = take(cuda::argmax_workspace_bytes(1), "choice of a token");
  attention_workspace.fill(0);
  argmax_workspace.fill(0);
  positions.fill(0);

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
}

void CudaDecoder::Impl::run(const Group& group, int64_t layer, Input input, const float* in, float threshold, float* y,
                            const Fused& fused) {
  if (threshold > 0 && counts.bytes() > 0) {
    const int64_t width = input_widths(config)[size_t(input)];
    cuda::launch_count_inactive(device, stream, in, width, group.norms, threshold,
                                counts.as<unsigned long long>() + layer * kInputs + int64_t(input));
  }
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
    args.has_sibling = &run != &group.runs.back();
    args.is_sibling = &run != &group.runs.front();
    cuda::launch_gemv(device, stream, *run.layout, sparse ? run.sparse : run.dense, args);
    clear = {};
  }
  if (group.rows.empty()) return;
  std::array<cuda::RowsPart, 4> parts;
  for (size_t i = 0; i < group.rows.size(); ++i)
    parts[i] = {group.rows[i].weights, group.rows[i].bias, y + group.rows[i].at};
  cuda::launch_rows(device, stream, {{parts.data(), group.rows.size()}, in, threshold});
}

void CudaDecoder::Impl::record(bool sparse) {
  const Config& c = config;
  const auto threshold = [&](int64_t layer, Input input) {
    return sparse ? sparsity->thresholds.t[size_t(layer)][size_t(input)] : 0.0f;
  };
  cuda::launch_embed(device, stream, embedding, ids.as<int32_t>(), 1, x);
  const int64_t kv_values = c.n_kv_heads * context * c.head_dim;
  for (int64_t index = 0; index < c.n_layers; ++index) {
    const Layer& layer = layers[size_t(index)];
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

    cuda::AttentionArgs attention;
    cuda::Heads& heads = attention.heads;
    heads.q = qkv_y + layer.qkv.at[0];
    heads.k = qkv_y + layer.qkv.at[1];
    heads.v = qkv_y + layer.qkv.at[2];
    heads.q_stride = c.n_heads * c.head_dim;
    heads.kv_stride = c.n_kv_heads * c.head_dim;
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
    attention.with_heads = true;
    attention.window = c.window;
    attention.scale = 1 / std::sqrt(float(c.head_dim));
    attention.out = attended;
    attention.preset = layer.o.to_preset(o_y);
    attention.workspace = attention_workspace.data();
    cuda::launch_attention(device, stream, attention);
    run(layer.o, index, Input::attn_out, attended, threshold(index, Input::attn_out), o_y);

    norm.add = o_y;
    norm.weight = layer.ffn_norm;
    norm.bias = layer.ffn_norm_bias;
    norm.preset = layer.up.to_preset(up_y);
    cuda::launch_norm(device, stream, norm);
    // The gate is taken where it is read: by the product with zigzag weights. Counts need its result apart.
    const bool gated_there = c.mlp == Mlp::swiglu && !layer.up.runs.empty() && layer.down.all_zigzag() &&
                             layer.down.start == nullptr && counts.bytes() == 0;
    if (gated_there) {
      run(layer.up, index, Input::ffn_in, h, threshold(index, Input::ffn_in), up_y,
          {.up = nullptr, .clear = {down_y, layer.down.outputs, nullptr}});
      run(layer.down, index, Input::ffn_down, up_y, threshold(index, Input::ffn_down), down_y,
          {.up = up_y + layer.up.at[1], .clear = {}});
      continue;
    }
    run(layer.up, index, Input::ffn_in, h, threshold(index, Input::ffn_in), up_y);
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
  cuda::NormArgs norm;
  norm.x = x;
  norm.add = down_y;
  norm.weight = output_norm;
  norm.bias = output_norm_bias;
  norm.eps = c.norm_eps;
  norm.K = c.n_embd;
  norm.y = h;
  cuda::launch_norm(device, stream, norm);
  const cuda::RowsPart part = {head, head_bias, logits.as<float>()};
  cuda::launch_rows(device, stream, {{&part, 1}, h});
  cuda::ArgmaxArgs choice;
  choice.x = logits.as<float>();
  choice.N = c.n_vocab;
  choice.ids = ids.as<int32_t>();
  choice.position = positions.as<int32_t>();
  choice.workspace = argmax_workspace.data();
  cuda::launch_argmax(device, stream, choice);
}

void CudaDecoder::Impl::record_sparse() {
  sparse_token.reset();
  if (counts.bytes() > 0) counts.fill(0);
  sparse_tokens = 0;
  if (sparsity) sparse_token.emplace(stream, [&] { record(true); });
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

void CudaDecoder::Impl::launch(bool may_skip) {
  const bool sparse = may_skip && sparse_token && position >= sparsity->dense_prefix;
  (sparse ? *sparse_token : *dense_token).launch(stream);
  sparse_tokens += sparse;
  ++position;
}

void CudaDecoder::Impl::step(int32_t id, bool may_skip) {
  stream.synchronize();
  ids.upload(std::as_bytes(std::span(&id, 1)));
  launch(may_skip);
}

std::span<const float> CudaDecoder::Impl::read_logits() {
  stream.synchronize();
  logits.download(std::as_writable_bytes(std::span(host_logits)));
  return host_logits;
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
  d.context = options.context > 0 ? options.context : c.n_ctx;
  if (d.context > c.n_ctx)
    throw Error("a context of {} tokens was asked for; this model takes 1 to {}", d.context, c.n_ctx);

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
    if (table->layout->zigzag)
      throw Error("--device cuda: {}: is {}; embedding and head must be in a row layout", table->name,
                  table->layout->name);
  int64_t weights = prepared_bytes({&embedding, 1}) + (tied ? 0 : prepared_bytes({&output, 1}));
  for (const auto& layer : groups)
    for (const Parts& parts : layer) weights += prepared_bytes(parts);
  const int64_t cache = 2 * c.n_layers * kv * d.context * int64_t(sizeof(f16));
  const int64_t rest = (c.n_vocab + d.context * c.rope.n_rot) * int64_t(sizeof(float)) + (int64_t{64} << 20);
  device.require(weights + cache + rest,
                 fmt::format("{}: {} MB of weights, {} MB of key-value cache for {} tokens and {} MB of work space",
                             checkpoint.path(), weights >> 20, cache >> 20, d.context, rest >> 20));

  std::optional<Progress> progress;
  if (options.progress) progress.emplace("Uploading", c.n_layers + 1, "layers");
  d.embedding = d.upload_rows(*embedding.layout, embedding.shape, embedding.bytes, pool);
  d.head = tied ? d.embedding : d.upload_rows(*output.layout, output.shape, output.bytes, pool);
  d.head_bias = d.upload(output.bias);
  d.head_bytes = int64_t(output.bytes.size());
  const auto norm = [&](const std::string& name, const float*& weight, const float*& bias) {
    const NormWeights values = binder.norm(name, c);
    weight = d.upload(values.weight);
    bias = d.upload(values.bias);
  };
  for (int64_t index = 0; index < c.n_layers; ++index) {
    const auto name = [&](const char* part) { return fmt::format("blk.{}.{}", index, part); };
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
  d.take_workspace();
  d.host_logits.resize(size_t(c.n_vocab));
  d.dense_token.emplace(d.stream, [&] { d.record(false); });
  return std::unique_ptr<CudaDecoder>(new CudaDecoder(std::move(impl)));
}

const Config& CudaDecoder::config() const { return impl_->config; }
int64_t CudaDecoder::length() const { return impl_->position; }
int64_t CudaDecoder::capacity() const { return impl_->context; }

double CudaDecoder::measure_read_gb_s() {
  Impl& d = *impl_;
  cuda::Buffer buffer(d.device,
                      std::min(d.device.free_bytes(), std::max(int64_t{1} << 30, 8 * d.device.info().cache_bytes)),
                      "what is read to measure the device's memory");
  buffer.fill(1);
  return cuda::measure_read_gb_s(d.device, d.stream, buffer);
}

std::string CudaDecoder::explain() const {
  const Impl& d = *impl_;
  std::string out;
  const auto add = [&](const char* name, const Group& group) {
    std::string how;
    for (const ZigzagRun& run : group.runs)
      how += fmt::format("{}{}, dense {}{}", how.empty() ? "" : "; then ", run.layout->name, cuda::describe(run.dense),
                         d.sparsity ? ", sparse " + cuda::describe(run.sparse) : "");
    std::string rows;
    for (const RowPart& part : group.rows)
      rows += fmt::format("{}{}", rows.empty() ? "" : ", ", part.weights.layout->name);
    if (!rows.empty()) how += fmt::format("{}{}, in rows", how.empty() ? "" : "; then ", rows);
    out += fmt::format("{}: {}\n", name, how);
  };
  const Layer& layer = d.layers.front();
  add("attn_q, attn_k, attn_v", layer.qkv);
  add("attn_output", layer.o);
  add(d.config.mlp == Mlp::swiglu ? "ffn_gate, ffn_up" : "ffn_up", layer.up);
  add("ffn_down", layer.down);
  return out + fmt::format("output: {}, in rows\n", d.head.layout->name);
}

int64_t CudaDecoder::weight_bytes() const {
  int64_t bytes = impl_->head_bytes;
  for (const Layer& layer : impl_->layers) bytes += layer.qkv.bytes + layer.o.bytes + layer.up.bytes + layer.down.bytes;
  return bytes;
}

void CudaDecoder::truncate(int64_t length) {
  Impl& d = *impl_;
  if (length < 0 || length > d.position) throw Error("cannot truncate {} tokens to {}", d.position, length);
  d.stream.synchronize();
  d.position = length;
  const auto at = int32_t(length);
  d.positions.upload(std::as_bytes(std::span(&at, 1)));
}

void CudaDecoder::append(std::span<const int32_t> ids) {
  impl_->check_room(ids, int64_t(ids.size()));
  for (const int32_t id : ids) impl_->step(id, impl_->sparsity && impl_->sparsity->mask_batches);
}

std::span<const float> CudaDecoder::forward(std::span<const int32_t> ids) {
  impl_->check_room(ids, int64_t(ids.size()));
  for (const int32_t id : ids) impl_->step(id, ids.size() == 1 || (impl_->sparsity && impl_->sparsity->mask_batches));
  return impl_->read_logits();
}

void CudaDecoder::score(std::span<const int32_t> ids, const Decoder::LogitsSink& sink) {
  impl_->check_room(ids, int64_t(ids.size()));
  for (size_t i = 0; i < ids.size(); ++i) {
    impl_->step(ids[i], true);
    sink(int64_t(i), 1, impl_->read_logits().data());
  }
}

void CudaDecoder::set_sparsity(std::optional<SparsityOptions> options) {
  Impl& d = *impl_;
  if (options) check_sparsity(*options, d.config);
  const bool by_norms = options && !options->thresholds.norms.empty();
  const auto readers = [](Layer& layer) { return std::array{&layer.qkv, &layer.o, &layer.up, &layer.down}; };
  if (by_norms)
    for (Layer& layer : d.layers)
      for (const Group* group : readers(layer))
        if (!group->all_zigzag())
          throw Error("--device cuda: thresholds by wina need zigzag weights; use --criterion magnitude");
  std::deque<cuda::Buffer> norms;  // [layers][kInputs]
  if (by_norms)
    for (const auto& layer : options->thresholds.norms)
      for (const std::vector<float>& values : layer) {
        cuda::Buffer& buffer = norms.emplace_back(d.device, int64_t(values.size() * sizeof(float)), "column norms");
        buffer.upload(std::as_bytes(std::span(values)));
      }
  d.stream.synchronize();
  d.sparse_token.reset();  // before the norms that it reads go
  d.norms = std::move(norms);
  for (size_t l = 0; l < d.layers.size(); ++l)
    for (size_t i = 0; Group * group : readers(d.layers[l]))
      group->norms = by_norms ? d.norms[l * kInputs + i++].as<float>() : nullptr;
  d.sparsity = std::move(options);
  d.record_sparse();
}

void CudaDecoder::count_inputs(bool on) {
  Impl& d = *impl_;
  d.stream.synchronize();
  d.sparse_token.reset();  // before the counts that it writes go
  if (!on) d.counts = {};
  if (on && d.counts.bytes() == 0)
    d.counts = cuda::Buffer(d.device, d.config.n_layers * kInputs * int64_t(sizeof(unsigned long long)), "counts");
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
  d.stream.synchronize();
  d.ids.upload(std::as_bytes(std::span(&id, 1)));
  for (int64_t t = 0; t < count; ++t) d.launch(true);
}

void CudaDecoder::wait() { impl_->stream.synchronize(); }

}  // namespace lacuna::model
