#include "model/cuda_beams.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/calibration.h"
#include "model/cuda_shard.h"

namespace lacuna::model {

CudaBeams::CudaBeams(Engine& decoder, CudaShard& shard, int64_t beams)
    : decoder_(decoder), shard_(shard), beams_(beams), wanted_(std::min(2 * beams, decoder.config().n_vocab)) {
  if (beams < 1 || beams > cuda::kMostBeams)
    throw Error("{} beams; --device cuda runs 1 to {}, --device cpu more", beams, cuda::kMostBeams);
  likeliest_.resize(size_t(beams));
  log_sum_exp_.resize(size_t(beams));
  if (beams > 1) take_workspace();
}

void CudaBeams::take_workspace() {
  const Config& c = shard_.config;
  if (c.n_embd % 4 != 0 || c.n_ff % 4 != 0)
    throw Error("--device cuda: beams need widths that are multiples of 4; this model's are {} and {}", c.n_embd,
                c.n_ff);
  shard_.card.device.use();
  const Layer& layer = shard_.layers.front();
  const std::array<std::pair<float**, int64_t>, 9> parts = {{{&x_, c.n_embd},
                                                             {&h_, c.n_embd},
                                                             {&attended_, layer.qkv.outputs},
                                                             {&gated_, c.n_ff},
                                                             {&qkv_y_, layer.qkv.outputs},
                                                             {&o_y_, layer.o.outputs},
                                                             {&up_y_, layer.up.outputs},
                                                             {&down_y_, layer.down.outputs},
                                                             {&logits_, c.n_vocab}}};
  int64_t total = 0;
  for (const auto& [pointer, floats] : parts) total += padded(beams_ * floats);
  space_ = shard_.take(total * int64_t(sizeof(float)), "work space of beams");
  space_.fill(0);
  float* next = space_.as<float>();
  for (const auto& [pointer, floats] : parts) *pointer = std::exchange(next, next + padded(beams_ * floats));

  step_ = shard_.take(sizeof(cuda::BeamStep), "a step of beams");
  attention_workspace_ = shard_.take(
      cuda::attention_workspace_bytes(shard_.card.device, beams_, c.n_heads, c.n_kv_heads, c.head_dim), "attention");
  attention_workspace_.fill(0);
  sum_workspace_ = shard_.take(cuda::log_sum_exp_workspace_bytes(beams_, c.n_vocab), "probabilities");
  sum_workspace_.fill(0);
  const int64_t of_beam = cuda::top_k_workspace_bytes(c.n_vocab, wanted_);
  top_k_workspace_ = shard_.take(beams_ * of_beam, "choice of candidates");
  for (int64_t b = 0; b < beams_; ++b)
    top_k_workspace_.upload(std::as_bytes(std::span(&cuda::kNoBadValue, 1)), b * of_beam);
  static_assert(sizeof(cuda::TopKCandidate) == sizeof(double));
  found_here_.resize(size_t(beams_ * (wanted_ + 2)));
  found_ = shard_.take(int64_t(found_here_.size() * sizeof(cuda::TopKCandidate)), "candidates");

  if (shard_.arrived.bytes() == 0) return;
  int64_t sums = 1, rows = 1;
  for (const Layer& of : shard_.layers)
    for (const Group* group : of.readers())
      for (const ZigzagRun& run : group->runs) {
        const int64_t segments = cuda::few_segments(shard_.card.device.info(), run.columns);
        rows = std::max(rows, run.columns.rows);
        sums = std::max(sums, beams_ * segments * run.columns.rows * 256);
      }
  partial_ = shard_.take(sums * int64_t(sizeof(float)), "partial sums");
  arrived_ = shard_.take(rows * int64_t(sizeof(uint32_t)), "counters");
  arrived_.fill(0);
}

void CudaBeams::take_cache(int64_t steps) {
  if (beams_ == 1 || steps <= room_) return;
  const Config& c = shard_.config;
  graph_.reset();
  cache_ = cuda::Buffer();
  sources_ = cuda::Buffer();
  room_ = 0;
  const int64_t values = 2 * int64_t(shard_.layers.size()) * beams_ * c.n_kv_heads * steps * c.head_dim;
  cache_ = shard_.take(
      values * int64_t(sizeof(f16)),
      fmt::format("the keys and values of {} tokens of {} beams (-n and --ctx say how many)", steps, beams_).c_str());
  sources_ = shard_.take(steps * int64_t(sizeof(uint32_t)), "places of the beams' keys");
  room_ = steps;
  graph_.emplace(shard_.card.stream, [this] { record(); });
}

void CudaBeams::start(std::span<const int32_t> prompt, int64_t steps) {
  if (prompt.empty()) throw Error("no tokens to start from");
  shard_.card.device.use();
  take_cache(steps);
  decoder_.truncate(0);
  find_choices_of_one(decoder_.forward(prompt));
  prompt_ = int64_t(prompt.size());
  steps_done_ = 0, steps_ = std::min(steps, capacity() - prompt_);
}

void CudaBeams::find_choices_of_one(std::span<const float> logits) {
  log_sum_exp_[0] = find_choices(logits, wanted_, likeliest_[0]);
}

void CudaBeams::step(std::span<const int32_t> parents, std::span<const int32_t> ids) {
  if (beams_ == 1) return find_choices_of_one(decoder_.forward(ids));
  if (steps_done_ >= steps_)
    throw Error("beams have room for {} tokens behind a prompt of {}; ask for more steps, or a larger --ctx", steps_,
                prompt_);
  // Beams that are not there yet or no more do what the first one does.
  cuda::BeamStep now;
  for (int64_t b = 0; b < cuda::kMostBeams; ++b) {
    const auto of = b < int64_t(ids.size()) ? size_t(b) : 0;
    now.ids[b] = ids[of];
    now.parents |= uint32_t(parents[of]) << (4 * b);
  }
  now.first = int32_t(prompt_);
  now.position = int32_t(prompt_ + steps_done_);
  shard_.card.device.use();
  step_.upload(std::as_bytes(std::span(&now, 1)));
  graph_->launch(shard_.card.stream);
  ++steps_done_;
  shard_.card.stream.synchronize();
  found_.download(std::as_writable_bytes(std::span(found_here_)));
  for (size_t b = 0; b < ids.size(); ++b) {
    likeliest_[b].clear();
    const auto of_beam = std::span(found_here_).subspan(b * size_t(wanted_ + 1), size_t(wanted_));
    for (const cuda::TopKCandidate& c : of_beam) likeliest_[b].push_back({c.logit, c.id});
    std::memcpy(&log_sum_exp_[b], &found_here_[size_t(beams_ * (wanted_ + 1)) + b], sizeof(double));
  }
}

BeamChoices CudaBeams::choices(int64_t beam) const { return {log_sum_exp_[size_t(beam)], likeliest_[size_t(beam)]}; }

cuda::Preset CudaBeams::preset_of(const Group& group, float* y) const {
  if (!group.adds()) return {};
  return {y, beams_ * group.outputs, group.start, group.outputs};
}

void CudaBeams::norm(const float* add, int64_t add_row, const float* weight, const float* bias,
                     const cuda::Preset& preset) {
  cuda::NormArgs args;
  args.x = x_;
  args.add = add;
  args.add_row = add_row;
  args.weight = weight;
  args.bias = bias;
  args.eps = shard_.config.norm_eps;
  args.M = beams_;
  args.K = shard_.config.n_embd;
  args.y = h_;
  args.preset = preset;
  cuda::launch_norm(shard_.card.device, shard_.card.stream, args);
}

void CudaBeams::multiply(const Group& group, const float* x, int64_t x_stride, float* y) {
  cuda::Device& device = shard_.card.device;
  cuda::Stream& stream = shard_.card.stream;
  const bool fixed_order = shard_.arrived.bytes() > 0;
  for (const ZigzagRun& run : group.runs) {
    cuda::GemvFewArgs args;
    args.weights = run.columns;
    args.M = beams_;
    args.x = x;
    args.x_stride = x_stride;
    args.y = y + run.at;
    args.y_stride = group.outputs;
    if (fixed_order)
      args.workspace = {partial_.as<float>(), arrived_.as<uint32_t>(), group.start ? group.start + run.at : nullptr};
    cuda::launch_gemv_few(device, stream, *run.layout, args);
  }
  for (const KeptRun& run : group.kept) {
    for (int64_t b = 0; b < beams_; ++b) {
      cuda::GroupsArgs args;
      args.weights = run.groups;
      args.x = x + b * x_stride;
      args.y = y + b * group.outputs + run.at;
      if (fixed_order)
        args.workspace = {shard_.partial.as<float>(), shard_.arrived.as<uint32_t>(),
                          group.start ? group.start + run.at : nullptr};
      cuda::launch_groups(device, stream, *run.layout, run.plan, args);
    }
  }
  if (group.rows.empty()) return;
  std::array<cuda::RowsPart, 4> parts;
  for (size_t i = 0; i < group.rows.size(); ++i)
    parts[i] = {group.rows[i].weights, group.rows[i].bias, y + group.rows[i].at};
  cuda::RowsArgs args;
  args.parts = {parts.data(), group.rows.size()};
  args.x = x;
  args.M = beams_;
  args.x_stride = x_stride;
  args.y_stride = group.outputs;
  cuda::launch_rows(device, stream, args);
}

void CudaBeams::record() {
  const Config& c = shard_.config;
  auto* const step = step_.as<cuda::BeamStep>();
  cuda::launch_order_beams(shard_.card.device, shard_.card.stream, step, sources_.as<uint32_t>(), room_);
  cuda::launch_embed(shard_.card.device, shard_.card.stream, *shard_.card.embedding, step->ids, beams_, x_);
  for (int64_t index = 0; index < int64_t(shard_.layers.size()); ++index) record_layer(index);
  norm(down_y_, shard_.layers.back().down.outputs, shard_.output_norm, shard_.output_norm_bias, {});
  const cuda::RowsPart head = {shard_.head.rows[0].weights, shard_.head.rows[0].bias, logits_};
  cuda::RowsArgs args;
  args.parts = {&head, 1};
  args.x = h_;
  args.M = beams_;
  args.x_stride = c.n_embd;
  args.y_stride = c.n_vocab;
  cuda::launch_rows(shard_.card.device, shard_.card.stream, args);
  record_choices();
}

void CudaBeams::record_layer(int64_t index) {
  const Config& c = shard_.config;
  const Layer& layer = shard_.layers[size_t(index)];
  norm(index > 0 ? down_y_ : nullptr, layer.down.outputs, layer.attn_norm, layer.attn_norm_bias,
       preset_of(layer.qkv, qkv_y_));
  multiply(layer.qkv, h_, c.n_embd, qkv_y_);

  const auto* const step = step_.as<cuda::BeamStep>();
  const int64_t values = beams_ * c.n_kv_heads * room_ * c.head_dim;
  f16* const keys = cache_.as<f16>() + 2 * index * values;
  cuda::AttentionArgs attention;
  attention.heads = shard_.heads_of(layer, index, qkv_y_);
  attention.heads.M = beams_;
  attention.heads.position = &step->position;
  attention.heads.beams = {keys, keys + values, room_, sources_.as<uint32_t>(), &step->first};
  attention.with_heads = true;
  attention.window = c.window;
  attention.scale = 1 / std::sqrt(float(c.head_dim));
  attention.out = attended_;
  attention.preset = preset_of(layer.o, o_y_);
  attention.workspace = attention_workspace_.data();
  cuda::launch_attention(shard_.card.device, shard_.card.stream, attention);
  multiply(layer.o, attended_, layer.qkv.outputs, o_y_);

  norm(o_y_, layer.o.outputs, layer.ffn_norm, layer.ffn_norm_bias, preset_of(layer.up, up_y_));
  multiply(layer.up, h_, c.n_embd, up_y_);
  const bool swiglu = c.mlp == Mlp::swiglu;
  cuda::GateRowsArgs gate;
  gate.gate = swiglu ? cuda::Gate::swiglu : cuda::Gate::relu;
  gate.x = up_y_;
  gate.up = swiglu ? up_y_ + layer.up.at[1] : nullptr;
  gate.stride = layer.up.outputs;
  gate.M = beams_;
  gate.K = c.n_ff;
  gate.y = gated_;
  gate.preset = preset_of(layer.down, down_y_);
  cuda::launch_gate_rows(shard_.card.device, shard_.card.stream, gate);
  multiply(layer.down, gated_, c.n_ff, down_y_);
}

void CudaBeams::record_choices() {
  const int64_t N = shard_.config.n_vocab;
  cuda::TopKArgs top;
  top.x = logits_;
  top.M = beams_;
  top.N = N;
  top.k = int(wanted_);
  top.out = found_.as<cuda::TopKCandidate>();
  top.workspace = top_k_workspace_.data();
  cuda::launch_top_k(shard_.card.device, shard_.card.stream, top);
  cuda::LogSumExpArgs sum;
  sum.x = logits_;
  sum.M = beams_;
  sum.N = N;
  sum.out = reinterpret_cast<double*>(found_.as<cuda::TopKCandidate>() + beams_ * (wanted_ + 1));
  sum.workspace = sum_workspace_.data();
  cuda::launch_log_sum_exp(shard_.card.device, shard_.card.stream, sum);
}

}  // namespace lacuna::model
