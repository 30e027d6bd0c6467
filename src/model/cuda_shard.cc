#include "model/cuda_shard.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/error.h"
#include "kernels/cuda/calibration.h"
#include "kernels/cuda/prepared.h"
#include "model/layer_ops.h"

namespace lacuna::model {

using kernels::WeightView;

namespace {

constexpr int64_t kMostLogitBytes = int64_t{128} << 20;  // that wait for the host

/// Groups that are kept of group-sparse parts, to the nearest 5%: shares that are nearer than that have one plan.
int kept_percent(std::span<const WeightView> parts) {
  int64_t kept = 0, groups = 0;
  for (const WeightView& part : parts) {
    kept += part.params.kept_groups;
    groups += part.shape.N * ((part.shape.K + part.params.group_size - 1) / part.params.group_size);
  }
  return 5 * int(std::lround(20 * double(kept) / double(std::max<int64_t>(1, groups))));
}

}  // namespace

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

BatchSpace::BatchSpace(const Config& c, int64_t n_vocab, int64_t context, int64_t qkv_outputs, int64_t up_outputs,
                       int64_t most_weight_bytes) {
  tokens = std::min(kMostBatch, context);
  const auto floats = [&](int64_t rows, int64_t width) {
    return (rows * width * int64_t(sizeof(float)) + 255) / 256 * 256;
  };
  constexpr int64_t kRows = cuda::kOperandRows;
  logit_tokens = std::clamp(kMostLogitBytes / (n_vocab * int64_t(sizeof(float))) / kRows * kRows, kRows, kMostBatch);
  logit_tokens = std::min(logit_tokens, tokens);
  const int64_t q = c.n_heads * c.head_dim, widest = std::max({c.n_embd, q, c.n_ff});
  x = floats(tokens, c.n_embd);
  attended = floats(tokens, q);
  qkv = floats(tokens, qkv_outputs);
  up = floats(tokens, up_outputs);
  logits = floats(logit_tokens, n_vocab);
  inputs = cuda::operand_bytes(tokens, widest);
  scales = floats(1, tokens);
  for (const auto& [N, K] : {std::pair{qkv_outputs, c.n_embd}, std::pair{c.n_embd, q}, std::pair{up_outputs, c.n_embd},
                             std::pair{c.n_embd, c.n_ff}, std::pair{n_vocab, c.n_embd}})
    weights = std::max(weights, cuda::operand_bytes(padded(N), K));
  weights = std::min(weights, std::max(most_weight_bytes, cuda::operand_bytes(padded(1), widest)));
}

bool Group::skips() const {
  return std::ranges::all_of(runs, [](const ZigzagRun& run) { return run.sparse.skips; });
}

void Card::mark(Kind kind) {
  if (marks == nullptr || (!marks->kinds.empty() && marks->kinds.back() == kind)) return;
  marks->kinds.push_back(kind);
  marks->marks.emplace_back().record(stream);
}

CudaShard::CudaShard(const Config& whole, const TensorSplit& split, int64_t i, Card& c, const cuda::Plans& plans,
                     int64_t positions_held)
    : config(whole),
      card(c),
      index(i),
      shards(split.shards()),
      vocabulary(split.rows(i, whole.n_vocab)),
      context(positions_held),
      plans_(plans) {
  config.n_heads = split.heads(i).count;
  config.n_kv_heads = split.kv_heads(i).count;
  config.n_ff = split.ff(i).count;
}

const float* CudaShard::upload(std::span<const float> values) {
  if (values.empty()) return nullptr;
  cuda::Buffer& buffer = buffers.emplace_back(take(int64_t(values.size_bytes()), "vectors"));
  buffer.upload(std::as_bytes(values));
  return buffer.as<float>();
}

cuda::Rows CudaShard::upload_rows(const WeightView& weights, ThreadPool& pool) {
  const auto [N, K] = weights.shape;
  HugeBuffer prepared(size_t(N * cuda::row_places(*weights.layout, K, weights.params).row_bytes));
  cuda::prepare_rows(*weights.layout, weights.shape, weights.params, weights.bytes, pool, prepared.data());
  cuda::Buffer& buffer = buffers.emplace_back(take(int64_t(prepared.size()), "weights"));
  buffer.upload(prepared.bytes());
  return {weights.layout, buffer.data(), N, K, weights.params};
}

Group CudaShard::make_group(std::span<const WeightView> parts, ThreadPool& pool) {
  Group group;
  for (const WeightView& part : parts) {
    group.at.push_back(group.outputs);
    group.outputs += padded(part.shape.N);
    group.part_bytes.push_back(int64_t(part.bytes.size()));
    group.bytes += group.part_bytes.back();
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
      cuda::launch_weight_scales(card.device, card.stream, *run.layout, run.columns, group.scale + run.at);
      continue;
    }
    if (cuda::is_group_layout(*parts[first].layout)) {
      group.kept.push_back(upload_kept(parts.subspan(first, end - first), group.at[first], scale, pool));
      continue;
    }
    for (size_t i = first; i < end; ++i) {
      const float* const bias = parts[i].bias.empty() ? nullptr : group.start + group.at[i];
      group.rows.push_back({upload_rows(parts[i], pool), bias, group.at[i]});
      cuda::launch_weight_scales(card.device, card.stream, group.rows.back().weights, group.scale + group.at[i]);
    }
  }
  return group;
}

ZigzagRun CudaShard::upload_run(std::span<const WeightView> parts, int64_t at, ThreadPool& pool) {
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

KeptRun CudaShard::upload_kept(std::span<const WeightView> parts, int64_t at, cuda::Buffer& scale, ThreadPool& pool) {
  const cuda::PreparedGroups prepared = cuda::prepare_groups(parts, pool);
  cuda::Buffer& buffer = buffers.emplace_back(take(cuda::laid_out_bytes(prepared), "weights"));
  KeptRun run = {prepared.layout, {}, kept_percent(parts), {}, at};
  cuda::each_part(prepared, [&](int64_t to, std::span<const std::byte> bytes) { buffer.upload(bytes, to); });
  run.groups = cuda::laid_out(prepared, buffer.data());
  scale.upload(std::as_bytes(std::span(prepared.scale)), at * int64_t(sizeof(float)));
  run.plan = choose_plan(run);
  return run;
}

cuda::GemvPlan CudaShard::choose_plan(const ZigzagRun& run, int left_out) const {
  if (const cuda::GemvPlan* plan = plans_.find({run.layout->id, run.columns.rows, run.columns.K, left_out}))
    return *plan;
  return cuda::default_plan(card.device.info(), *run.layout, run.columns,
                            left_out > 0 ? cuda::Inputs::threshold : cuda::Inputs::dense);
}

cuda::GroupsPlan CudaShard::choose_plan(const KeptRun& run) const {
  if (const cuda::GroupsPlan* plan = plans_.find_groups(run.product())) return cuda::fitted(run.groups, *plan);
  return cuda::default_plan(card.device.info(), *run.layout, run.groups);
}

std::pair<int64_t, int64_t> CudaShard::fixed_order_space() const {
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

void CudaShard::take_workspace(bool deterministic, bool from_host, int64_t batch_weight_bytes) {
  const Config& c = config;
  const int64_t kv_values = c.n_kv_heads * context * c.head_dim, half = c.rope.n_rot / 2;
  cache = take(2 * int64_t(layers.size()) * kv_values * int64_t(sizeof(f16)), "key-value cache");
  space = BatchSpace(c, vocabulary.count, context, layers.front().qkv.outputs, layers.front().up.outputs,
                     batch_weight_bytes);
  ids = take(space.tokens * int64_t(sizeof(int32_t)), "tokens");
  positions = take(sizeof(int32_t), "position");
  attention_workspace =
      take(cuda::attention_workspace_bytes(card.device, 1, c.n_heads, c.n_kv_heads, c.head_dim), "attention");
  argmax_workspace = take(cuda::argmax_workspace_bytes(1), "choice of a token");
  attention_workspace.fill(0);
  argmax_workspace.fill(0);
  ids.fill(0);
  positions.fill(0);

  if (deterministic) {
    const auto [sums, rows] = fixed_order_space();
    partial = take(sums * int64_t(sizeof(float)), "partial sums");
    arrived = take(rows * int64_t(sizeof(uint32_t)), "counters");
    arrived.fill(0);
  }

  std::vector<float> tables(size_t(2 * context * half));
  for (int64_t p = 0; p < context; ++p)
    rotary_row(c.rope, p, tables.data() + p * half, tables.data() + (context + p) * half);
  cos_ = upload(tables);
  sin_ = cos_ + context * half;

  const Layer& layer = layers.front();
  const std::array<std::pair<float**, int64_t>, 6> parts = {{{&x, c.n_embd},
                                                             {&h_, c.n_embd},
                                                             {&attended_, c.n_heads * c.head_dim},
                                                             {&gated_, c.n_ff},
                                                             {&qkv_y_, layer.qkv.outputs},
                                                             {&up_y_, layer.up.outputs}}};
  int64_t total = 0;
  for (const auto& [pointer, floats] : parts) total += padded(floats);
  cuda::Buffer& buffer = buffers.emplace_back(take(total * int64_t(sizeof(float)), "work space"));
  buffer.fill(0);
  float* next = buffer.as<float>();
  for (const auto& [pointer, floats] : parts) *pointer = std::exchange(next, next + padded(floats));

  cuda::Buffer& of_batch = buffers.emplace_back(take(space.bytes() - space.logits, "work space of a batch"));
  of_batch.fill(0);
  batch_logits = take(space.logits, "logits of a batch");
  if (from_host) handed = take(space.x, "results of the CPU's layers");
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
  if (from_host) x = batch.x = handed.as<float>();

  // What is exchanged lies with the card: its first shard takes it.
  if (card.sums.bytes() == 0) {
    const auto floats = [&](int64_t count, const char* what) { return take(count * int64_t(sizeof(float)), what); };
    card.sum_stride = layer.o.outputs;
    card.sums = floats(2 * shards * card.sum_stride, "results of the shards");
    card.sums.fill(0);
    card.o = card.sums.as<float>();
    card.down = card.o + shards * card.sum_stride;
    card.logits = floats(shards * card.logit_stride, "logits");
    if (shards > 1) card.batch_sums = floats(shards * batch_stride(space.tokens, c.n_embd), "results of the shards");
  }
  o_y_ = card.o + index * card.sum_stride;
  down_y_ = card.down + index * card.sum_stride;
}

void CudaShard::record_embedding(int64_t M, float* to) {
  card.mark(Kind::rest);
  if (card.embedding) cuda::launch_embed(card.device, card.stream, *card.embedding, ids.as<int32_t>(), M, to);
}

unsigned long long* CudaShard::counter(int64_t layer, Input input) const {
  const bool own_inputs = input == Input::attn_out || input == Input::ffn_down;  // the others are every shard's
  if (counts.bytes() == 0 || !(own_inputs || index == 0)) return nullptr;
  return counts.as<unsigned long long>() + layer * kInputs + int64_t(input);
}

void CudaShard::run(const Group& group, int64_t layer, Input input, const float* in, float threshold, float* y,
                    const Fused& fused) {
  if (auto* const to = counter(layer, input); threshold > 0 && to != nullptr) {
    card.mark(Kind::rest);
    const int64_t width = input_widths(config)[size_t(input)];
    cuda::launch_count_inactive(card.device, card.stream, in, width, group.norms, threshold, to);
  }
  card.mark(Kind::linear);
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
    cuda::launch_gemv(card.device, card.stream, *run.layout, sparse ? run.sparse : run.dense, args);
    clear = {};
  }
  const auto after = [&](const KeptRun& run) -> const KeptRun* {
    if (&run != &group.kept.back()) return &run + 1;
    return fused.next == nullptr || fused.next->kept.empty() ? nullptr : &fused.next->kept.front();
  };
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
    if (const KeptRun* next = after(run)) args.next = cuda::upcoming(*next->layout, next->groups, next->plan);
    if (arrived.bytes() > 0)
      args.workspace = {partial.as<float>(), arrived.as<uint32_t>(), group.start ? group.start + run.at : nullptr};
    cuda::launch_groups(card.device, card.stream, *run.layout, run.plan, args);
    clear = {};
  }
  if (group.rows.empty()) return;
  std::array<cuda::RowsPart, 4> parts;
  for (size_t i = 0; i < group.rows.size(); ++i)
    parts[i] = {group.rows[i].weights, group.rows[i].bias, y + group.rows[i].at};
  cuda::launch_rows(card.device, card.stream, {{parts.data(), group.rows.size()}, in, threshold});
}

cuda::Heads CudaShard::heads_of(const Layer& layer, int64_t layer_index, float* of_qkv) {
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
  heads.cos = cos_;
  heads.sin = sin_;
  heads.n_rot = c.rope.n_rot;
  heads.adjacent = c.rope.adjacent;
  f16* const keys = cache.as<f16>() + 2 * layer_index * kv_values;
  heads.cache = {keys, keys + kv_values, context};
  heads.position = positions.as<int32_t>();
  return heads;
}

cuda::NormArgs CudaShard::norm_of_token(const float* add, const float* weight, const float* bias) const {
  cuda::NormArgs norm;
  norm.x = x;
  norm.add = add;
  norm.parts = int(shards);
  norm.add_stride = card.sum_stride;
  norm.weight = weight;
  norm.bias = bias;
  norm.eps = config.norm_eps;
  norm.K = config.n_embd;
  norm.y = h_;
  return norm;
}

void CudaShard::record_attention(int64_t layer_index, const LayerThresholds& thresholds) {
  const Config& c = config;
  const Layer& layer = layers[size_t(layer_index)];
  card.mark(Kind::rest);
  // What is added is of the layer before.
  cuda::NormArgs norm = norm_of_token(layer_index > 0 ? card.down : nullptr, layer.attn_norm, layer.attn_norm_bias);
  norm.preset = layer.qkv.to_preset(qkv_y_);
  cuda::launch_norm(card.device, card.stream, norm);
  run(layer.qkv, layer_index, Input::attn_in, h_, thresholds[size_t(Input::attn_in)], qkv_y_,
      {.up = nullptr, .clear = {}, .next = &layer.o});

  card.mark(Kind::attention);
  cuda::AttentionArgs attention;
  attention.heads = heads_of(layer, layer_index, qkv_y_);
  attention.heads.q_stride = c.n_heads * c.head_dim;
  attention.heads.kv_stride = c.n_kv_heads * c.head_dim;
  attention.with_heads = true;
  attention.window = c.window;
  attention.scale = 1 / std::sqrt(float(c.head_dim));
  attention.out = attended_;
  attention.preset = layer.o.to_preset(o_y_);
  attention.workspace = attention_workspace.data();
  cuda::launch_attention(card.device, card.stream, attention);
  run(layer.o, layer_index, Input::attn_out, attended_, thresholds[size_t(Input::attn_out)], o_y_,
      {.up = nullptr, .clear = {}, .next = &layer.up});
}

void CudaShard::record_mlp(int64_t layer_index, const LayerThresholds& thresholds) {
  const Config& c = config;
  const Layer& layer = layers[size_t(layer_index)];
  const float ffn_in = thresholds[size_t(Input::ffn_in)], ffn_down = thresholds[size_t(Input::ffn_down)];
  card.mark(Kind::rest);
  cuda::NormArgs norm = norm_of_token(card.o, layer.ffn_norm, layer.ffn_norm_bias);
  norm.preset = layer.up.to_preset(up_y_);
  cuda::launch_norm(card.device, card.stream, norm);
  const auto following = size_t(layer_index) + 1;
  const Group* const qkv = following < layers.size() ? &layers[following].qkv : nullptr;
  // The gate is taken where it is read: by products that add. Counts need its result apart.
  const bool gated_there = c.mlp == Mlp::swiglu && layer.up.adds() && layer.down.only_adds() &&
                           layer.down.start == nullptr && counts.bytes() == 0;
  if (gated_there) {
    run(layer.up, layer_index, Input::ffn_in, h_, ffn_in, up_y_,
        {.up = nullptr, .clear = {down_y_, layer.down.outputs, nullptr}, .next = &layer.down});
    run(layer.down, layer_index, Input::ffn_down, up_y_, ffn_down, down_y_,
        {.up = up_y_ + layer.up.at[1], .clear = {}, .next = qkv});
    return;
  }
  run(layer.up, layer_index, Input::ffn_in, h_, ffn_in, up_y_, {.up = nullptr, .clear = {}, .next = &layer.down});
  card.mark(Kind::rest);
  cuda::GateArgs gate;
  gate.gate = c.mlp == Mlp::swiglu ? cuda::Gate::swiglu : cuda::Gate::relu;
  gate.x = up_y_;
  gate.up = c.mlp == Mlp::swiglu ? up_y_ + layer.up.at[1] : nullptr;
  gate.out = gated_;
  gate.count = c.n_ff;
  gate.preset = layer.down.to_preset(down_y_);
  cuda::launch_gate(card.device, card.stream, gate);
  run(layer.down, layer_index, Input::ffn_down, gated_, ffn_down, down_y_, {.up = nullptr, .clear = {}, .next = qkv});
}

void CudaShard::record_head(float* from, const float* sums) {
  card.mark(Kind::rest);
  cuda::NormArgs norm;
  norm.x = from;
  norm.add = sums;
  norm.parts = int(shards);
  norm.add_stride = card.sum_stride;
  norm.weight = output_norm;
  norm.bias = output_norm_bias;
  norm.eps = config.norm_eps;
  norm.K = config.n_embd;
  norm.y = h_;
  cuda::launch_norm(card.device, card.stream, norm);
  card.mark(Kind::linear);
  const cuda::RowsPart part = {head.rows[0].weights, head.rows[0].bias,
                               card.logits.as<float>() + index * card.logit_stride};
  cuda::launch_rows(card.device, card.stream, {{&part, 1}, h_});
}

void CudaShard::record_choice() {
  card.mark(Kind::rest);
  cuda::ArgmaxArgs choice;
  choice.x = card.logits.as<float>();
  choice.N = config.n_vocab;
  choice.ids = ids.as<int32_t>();
  choice.position = positions.as<int32_t>();
  choice.workspace = argmax_workspace.data();
  cuda::launch_argmax(card.device, card.stream, choice);
}

cuda::Operand CudaShard::make_inputs(const Group& group, const cuda::GemmInputs& args, int64_t M) {
  cuda::GemmInputs inputs = args;
  inputs.to = {batch.inputs, batch.scales, M, group.K()};
  cuda::launch_gemm_inputs(card.device, card.stream, inputs);
  return inputs.to;
}

cuda::Operand CudaShard::make_weights(const Group& group, int64_t first, int64_t count, std::byte* to) {
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
    if (part.rows > 0) cuda::launch_gemm_weights(card.device, card.ahead, *run.layout, run.columns, begin, part);
  }
  for (const KeptRun& run : group.kept) {
    const auto [begin, part] = share(run.at, run.groups.panels * cuda::kPanelRows);
    if (part.rows > 0) cuda::launch_gemm_weights(card.device, card.ahead, *run.layout, run.groups, begin, part);
  }
  for (const RowPart& row : group.rows) {
    const auto [begin, part] = share(row.at, row.weights.N);
    if (part.rows > 0) cuda::launch_gemm_weights(card.device, card.ahead, row.weights, begin, part);
  }
  return all;
}

cuda::Operand CudaShard::make_layer_inputs(int64_t layer, Input input, const Group& group, const cuda::GemmInputs& args,
                                           int64_t M) {
  if (!observer) return make_inputs(group, args, M);
  const int64_t K = group.K();
  write_inputs(args, M, K, observed.as<float>());
  observer(layer, input, observed.as<float>(), M, K);
  return make_inputs(group, {.x = observed.as<float>(), .stride = K, .to = {}}, M);
}

void CudaShard::write_inputs(const cuda::GemmInputs& args, int64_t M, int64_t K, float* y) {
  if (args.norm != nullptr) {
    cuda::NormArgs norm;
    norm.x = const_cast<float*>(args.x);  // nothing is added to it
    norm.weight = args.norm;
    norm.bias = args.norm_bias;
    norm.eps = args.eps;
    norm.M = M;
    norm.K = K;
    norm.y = y;
    return cuda::launch_norm(card.device, card.stream, norm);
  }
  if (args.gate != cuda::Gate::none)
    return cuda::launch_gate_rows(
        card.device, card.stream,
        {.gate = args.gate, .x = args.x, .up = args.up, .stride = args.stride, .M = M, .K = K, .y = y});
  cuda::launch_mask_rows(card.device, card.stream, {.x = args.x, .M = M, .K = K, .y = y});  // a copy
}

void CudaShard::reserve_observed() {
  if (observed.bytes() > 0) return;
  const auto widths = input_widths(config);
  const int64_t widest = *std::max_element(widths.begin(), widths.end());
  observed = take(space.tokens * widest * int64_t(sizeof(float)), "inputs of a layer");
}

void CudaShard::mask(int64_t layer, Input input, float* in, int64_t M, int64_t K, float t, int64_t first,
                     int64_t dense) {
  if (!(t > 0)) return;
  cuda::MaskRowsArgs args;
  args.x = args.y = in;
  args.M = M;
  args.K = K;
  args.t = t;
  args.norms = layers[size_t(layer)].readers()[size_t(input)]->norms;
  args.first = first;
  args.window = context;  // one, of all positions
  args.dense = dense;
  args.inactive = counter(layer, input);
  cuda::launch_mask_rows(card.device, card.stream, args);
}

void CudaShard::multiply(const Group& group, const cuda::Operand& inputs, Share outputs, bool add, float* y,
                         int64_t stride) {
  const int64_t at_once = space.weights / cuda::operand_bytes(padded(1), inputs.K) * padded(1);
  const int64_t end = outputs.first + outputs.count;
  for (int64_t first = outputs.first; first < end; first += at_once, turn_ ^= 1) {
    const int64_t count = std::min(at_once, end - first);
    card.ahead.wait(read_[turn_]);
    cuda::GemmArgs args;
    args.x = inputs;
    args.w = make_weights(group, first, count, batch.weights[turn_]);
    written_[turn_].record(card.ahead);
    card.stream.wait(written_[turn_]);
    args.bias = group.start == nullptr ? nullptr : group.start + first;
    args.add = add;
    args.y = y + (first - outputs.first);
    args.stride = stride;
    cuda::launch_gemm(card.device, card.stream, args);
    read_[turn_].record(card.stream);
  }
}

cuda::GemmInputs CudaShard::normed(const float* weight, const float* bias) const {
  return {.x = batch.x, .stride = config.n_embd, .norm = weight, .norm_bias = bias, .eps = config.norm_eps, .to = {}};
}

void CudaShard::multiply_half_block(const Group& group, const cuda::Operand& inputs, int64_t M) {
  const int64_t N = config.n_embd;
  if (shards == 1) return multiply(group, inputs, {0, N}, true, batch.x, N);
  multiply(group, inputs, {0, N}, false, card.batch_sums.as<float>() + index * batch_stride(M, N), N);
}

void CudaShard::batch_attention(int64_t layer_index, int64_t M) {
  const Layer& layer = layers[size_t(layer_index)];
  cuda::GemmInputs args = normed(layer.attn_norm, layer.attn_norm_bias);
  multiply(layer.qkv, make_layer_inputs(layer_index, Input::attn_in, layer.qkv, args, M), {0, layer.qkv.outputs}, false,
           batch.qkv_y, layer.qkv.outputs);

  cuda::BatchAttentionArgs attention;
  attention.heads = heads_of(layer, layer_index, batch.qkv_y);
  attention.heads.M = M;
  attention.window = config.window;
  attention.scale = 1 / std::sqrt(float(config.head_dim));
  attention.out = batch.attended;
  attention.out_stride = config.n_heads * config.head_dim;
  cuda::launch_heads(card.device, card.stream, attention.heads);
  cuda::launch_batch_attention(card.device, card.stream, attention);
  args = {.x = batch.attended, .stride = attention.out_stride, .to = {}};
  multiply_half_block(layer.o, make_layer_inputs(layer_index, Input::attn_out, layer.o, args, M), M);
}

void CudaShard::batch_mlp(int64_t layer_index, int64_t M) {
  const Layer& layer = layers[size_t(layer_index)];
  cuda::GemmInputs args = normed(layer.ffn_norm, layer.ffn_norm_bias);
  multiply(layer.up, make_layer_inputs(layer_index, Input::ffn_in, layer.up, args, M), {0, layer.up.outputs}, false,
           batch.up_y, layer.up.outputs);
  const bool swiglu = config.mlp == Mlp::swiglu;
  args = {.gate = swiglu ? cuda::Gate::swiglu : cuda::Gate::relu,
          .x = batch.up_y,
          .up = swiglu ? batch.up_y + layer.up.at[1] : nullptr,
          .stride = layer.up.outputs,
          .to = {}};
  multiply_half_block(layer.down, make_layer_inputs(layer_index, Input::ffn_down, layer.down, args, M), M);
}

void CudaShard::batch_add(int64_t M) {
  if (shards == 1) return;
  cuda::launch_add(card.device, card.stream, card.batch_sums.as<float>(), M * config.n_embd, batch.x, int(shards),
                   batch_stride(M, config.n_embd));
}

cuda::Operand CudaShard::batch_head_inputs(int64_t M) {
  return make_inputs(head, normed(output_norm, output_norm_bias), M);
}

void CudaShard::batch_head(const cuda::Operand& inputs, int64_t first, int64_t M) {
  cuda::Operand part = inputs;  // whole tiles
  part.tiles += cuda::operand_bytes(first, inputs.K);
  part.scale += first;
  part.rows = M;
  multiply(head, part, {0, vocabulary.count}, false, batch_logits.as<float>(), vocabulary.count);
}

}  // namespace lacuna::model
