#include "model/decoder.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "core/checked_math.h"
#include "core/error.h"
#include "core/progress.h"
#include "kernels/active.h"
#include "layout/layout.h"
#include "model/binder.h"
#include "model/layer_ops.h"

namespace lacuna::model {
namespace {

using kernels::Activation;
using kernels::LinearGroup;
using kernels::Output;
using kernels::WeightView;

constexpr int64_t kBatch = Decoder::kMostFirst;  // tokens that go through the layers together
constexpr int64_t kHeadRows = 128;               // rows of logits that exist at once
constexpr int64_t kAlignFloats = 16;             // 64 bytes

int64_t aligned(int64_t floats) { return (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats; }

struct Layer {
  NormWeights attn_norm, ffn_norm;
  std::vector<float> q_norm, k_norm;              // [head_dim], qwen3
  std::unique_ptr<LinearGroup> qkv, o, up, down;  // up: gate and up, or up alone
  std::array<double, kInputs> dense_below = {};   // of each group's plan
};

}  // namespace

struct Decoder::Impl {
  Config config;
  ThreadPool& pool;
  std::deque<std::vector<float>> biases;  // the groups point to them
  const io::Tensor* embedding = nullptr;  // in the mapped file
  const io::Tensor* positions = nullptr;
  std::vector<Layer> layers;
  std::optional<NormWeights> output_norm;
  std::unique_ptr<LinearGroup> project_in, project_out, head;
  int64_t n_word = 0;  // width of the embeddings

  std::optional<SparsityOptions> sparsity;
  SparsityCounts counts;
  Observer observer;
  bool one_token = false;  // what forward runs; rows of the last layer may be fewer than its tokens
  int64_t n_sessions = 1;  // several: rows are one token of each, all at the same position

  // Workspace: rows of kBatch tokens.
  HugeBuffer workspace;
  float *x = nullptr, *h = nullptr, *word = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *attended = nullptr,
        *gate = nullptr, *up = nullptr, *cos = nullptr, *sin = nullptr, *logits = nullptr, *position_rows = nullptr,
        *masked = nullptr;
  std::vector<int32_t> active;  // [widest input]

  explicit Impl(ThreadPool& p) : pool(p) {}

  int64_t q_width() const { return config.n_heads * config.head_dim; }
  int64_t kv_width() const { return config.n_kv_heads * config.head_dim; }

  void bind(const io::Checkpoint& checkpoint, const LoadOptions& options);
  void take_workspace();

  void norm(const NormWeights& weights, const float* in, int64_t M, float* out) const {
    apply_norm(config, pool, weights, in, M, out);
  }
  /// Runs the group of one layer that reads `in`: [M, width of the input], the first row at `position`.
  void run_group(int64_t index, Input input, LinearGroup& group, const float* in, int64_t M, int64_t position,
                 std::span<const Output> out);
  void embed(std::span<const int32_t> ids, int64_t position);
  void rotary_tables(int64_t M, int64_t position);
  /// Runs the layers; rows of x from M - `wanted` on hold the last layer's result afterwards.
  /// Several sessions: one row of each, wanted is M.
  void run_layers(std::span<Session* const> sessions, int64_t M, int64_t wanted);
  /// Logits of rows [row, row + count) of x, count <= kHeadRows, into `logits`.
  void run_head(int64_t row, int64_t count);
  /// The whole of forward; sink may be nullptr for Want::none and Want::last.
  void forward(Session& session, std::span<const int32_t> ids, Want want, const LogitsSink* sink);
  void forward_each(std::span<Session* const> sessions, std::span<const int32_t> ids);
  void check_ids(const Session& session, std::span<const int32_t> ids, int64_t total) const;
};

void Decoder::Impl::bind(const io::Checkpoint& checkpoint, const LoadOptions& options) {
  const Config& c = config;
  Binder binder(checkpoint, biases);
  const bool gated = c.mlp == Mlp::swiglu;
  std::optional<Progress> progress;
  const auto plan_of = [&](std::span<const WeightView> parts) {
    kernels::Plan plan = options.plans == nullptr ? kernels::default_plan() : options.plans->of(parts);
    if (options.deterministic) plan.split = kernels::Plan::Split::rows;
    return plan;
  };
  double* dense_below = nullptr;  // of the next group
  const auto group = [&](std::vector<WeightView> parts) {
    const kernels::Plan plan = plan_of(parts);
    if (dense_below != nullptr) *dense_below++ = plan.dense_below;
    auto made = kernels::make_cpu_linear_group(parts, pool, options.prepare, plan);
    made->reserve(kBatch);
    return made;
  };

  const io::Tensor& words = checkpoint.require("token_embd.weight");
  n_word = words.shape.K;
  embedding = &binder.matrix("token_embd.weight", c.n_vocab, n_word);
  if (n_word != c.n_embd) {
    if (!binder.has("token_embd_proj_in.weight"))
      throw Error("{}: token_embd.weight has {} columns, embedding_length is {}, and there is no projection",
                  checkpoint.path(), n_word, c.n_embd);
    project_in = group({binder.weight("token_embd_proj_in", c.n_embd, n_word)});
    project_out = group({binder.weight("output_proj", n_word, c.n_embd)});
  }
  if (c.positions == Positions::learned)
    positions = &binder.matrix("position_embd.weight", c.n_ctx + c.position_offset, c.n_embd);
  binder.ignore("rope_freqs.weight");  // read by the configuration

  const int64_t n_layers = options.first_layers > 0 ? options.first_layers : c.n_layers;
  if (n_layers > c.n_layers) throw Error("{} layers of a model of {}", n_layers, c.n_layers);
  if (options.progress) progress.emplace("Loading", n_layers + (options.first_layers > 0 ? 0 : 1), "layers");
  for (int64_t index = 0; index < n_layers; ++index) {
    const auto name = [&](const char* part) { return fmt::format("blk.{}.{}", index, part); };
    Layer& layer = layers.emplace_back();
    layer.attn_norm = binder.norm(name("attn_norm"), c);
    layer.ffn_norm = binder.norm(name("ffn_norm"), c);
    if (c.qk_norm) {
      layer.q_norm = binder.vector(name("attn_q_norm.weight"), c.head_dim);
      layer.k_norm = binder.vector(name("attn_k_norm.weight"), c.head_dim);
    }
    dense_below = layer.dense_below.data();  // in the order of Input
    layer.qkv =
        group({binder.weight(name("attn_q"), q_width(), c.n_embd), binder.weight(name("attn_k"), kv_width(), c.n_embd),
               binder.weight(name("attn_v"), kv_width(), c.n_embd)});
    layer.o = group({binder.weight(name("attn_output"), c.n_embd, q_width())});
    std::vector<WeightView> wide;
    if (gated) wide.push_back(binder.weight(name("ffn_gate"), c.n_ff, c.n_embd));
    wide.push_back(binder.weight(name("ffn_up"), c.n_ff, c.n_embd));
    layer.up = group(std::move(wide));
    layer.down = group({binder.weight(name("ffn_down"), c.n_embd, c.n_ff)});
    if (progress) progress->add(1);
  }

  if (options.first_layers > 0) return;
  const bool final_norm = checkpoint.metadata().boolean(c.architecture + ".final_layer_norm").value_or(c.norm_first);
  if (final_norm) output_norm = binder.norm("output_norm", c);
  WeightView output;
  if (binder.has("output.weight")) {
    output = binder.weight("output", c.n_vocab, n_word);
  } else {  // tied: the embedding is the head
    output = {embedding->name, embedding->layout, embedding->shape, embedding->bytes, {}, embedding->params};
  }
  head = kernels::make_cpu_linear_group({&output, 1}, pool, options.prepare, plan_of({&output, 1}));
  head->reserve(kHeadRows);
  binder.check_all_used();
}

void Decoder::Impl::take_workspace() {
  const Config& c = config;
  const int64_t half = c.rope.n_rot / 2;
  const auto widths = input_widths(c);
  const int64_t widest = *std::max_element(widths.begin(), widths.end());
  active.resize(size_t(widest));
  const std::array<std::pair<float**, int64_t>, 14> parts = {{
      {&x, kBatch * c.n_embd},
      {&h, kBatch * std::max(c.n_embd, n_word)},
      {&word, kBatch * n_word},
      {&q, kBatch * q_width()},
      {&k, kBatch * kv_width()},
      {&v, kBatch * kv_width()},
      {&attended, kBatch * q_width()},
      {&gate, kBatch * c.n_ff},
      {&up, kBatch * c.n_ff},
      {&cos, kBatch * half},
      {&sin, kBatch * half},
      {&logits, head ? kHeadRows * c.n_vocab : 0},
      {&position_rows, positions != nullptr ? kBatch * c.n_embd : 0},
      {&masked, kBatch * widest},
  }};
  int64_t total = 0;
  for (const auto& [pointer, floats] : parts) total += aligned(floats);
  workspace = HugeBuffer(size_t(total) * sizeof(float));
  auto* next = reinterpret_cast<float*>(workspace.data());
  for (const auto& [pointer, floats] : parts) {
    *pointer = next;
    next += aligned(floats);
  }
}

void Decoder::Impl::run_group(int64_t index, Input input, LinearGroup& group, const float* in, int64_t M,
                              int64_t position, std::span<const Output> out) {
  const auto i = size_t(input);
  const int64_t K = input_widths(config)[i];
  if (observer) observer(index, input, in, M, K, position);
  Activation rows{in, M, K};
  const bool each = n_sessions > 1;
  const bool leaves_out = sparsity && (each ? sparsity->unite_sessions : one_token || sparsity->mask_batches);
  if (leaves_out && position + (each ? 1 : M) > sparsity->dense_prefix) {
    const Thresholds& thresholds = sparsity->thresholds;
    const float t = thresholds.t[size_t(index)][i];
    const float* norms = thresholds.norms.empty() ? nullptr : thresholds.norms[size_t(index)][i].data();
    const int64_t dense = each ? 0 : std::clamp<int64_t>(sparsity->dense_prefix - position, 0, M);
    std::atomic<int64_t> inactive{0};
    if (t == 0) {
      // everything is active
    } else if (M == 1 || each) {
      rows.active = active.data();
      rows.active_count = thresholds.group > 1
                              ? kernels::collect_active_groups(in, M, K, norms, t, thresholds.group, active.data())
                              : kernels::collect_active(pool, in, M, K, norms, t, active.data());
      inactive = M * (K - rows.active_count);
    } else {
      std::copy_n(in, dense * K, masked);
      pool.parallel_for(M - dense, 8, [&](int64_t begin, int64_t end) {
        int64_t found = 0;
        for (int64_t m = dense + begin; m < dense + end; ++m)
          found += mask_inactive(in + m * K, norms, t, K, masked + m * K, thresholds.group);
        inactive.fetch_add(found, std::memory_order_relaxed);
      });
      rows.x = masked;
    }
    SparsityCounts::Count& count = counts.layers[size_t(index)][i];
    count.inactive += inactive.load();
    count.inputs += (M - dense) * K;
    if (index == 0 && input == Input::attn_in) counts.tokens += M - dense;
  }
  group.run(rows, out);
}

void Decoder::Impl::embed(std::span<const int32_t> ids, int64_t position) {
  const Config& c = config;
  const auto M = int64_t(ids.size());
  float* rows = project_in ? word : x;
  pool.parallel_for(M, 16, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      layout::decode_rows(*embedding->layout, embedding->shape, embedding->bytes, ids[size_t(m)], 1, rows + m * n_word,
                          embedding->params);
  });
  if (project_in) {
    const std::array<Output, 1> out = {{{x, c.n_embd}}};
    project_in->run({word, M, n_word}, out);
  }
  if (positions != nullptr) {
    const int64_t together = n_sessions > 1 ? 1 : M;
    for (int64_t m = 0; m < M; m += together)
      layout::decode_rows(*positions->layout, positions->shape, positions->bytes, position + c.position_offset,
                          together, position_rows + m * c.n_embd, positions->params);
    kernels::add(pool, position_rows, M * c.n_embd, x);
  }
}

void Decoder::Impl::rotary_tables(int64_t M, int64_t position) {
  const Rope& rope = config.rope;
  const auto half = int64_t(rope.inv_freq.size());
  if (half == 0) return;
  pool.parallel_for(M, 32, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      rotary_row(rope, n_sessions > 1 ? position : position + m, cos + m * half, sin + m * half);
  });
}

void Decoder::Impl::run_layers(std::span<Session* const> sessions, int64_t M, int64_t wanted) {
  const Config& c = config;
  const int64_t position = sessions[0]->length(), each = M / int64_t(sessions.size());  // rows of a session
  const float scale = 1 / std::sqrt(float(c.head_dim));
  int64_t rows = M;
  float* residual = x;
  const auto n_layers = int64_t(layers.size());
  for (int64_t index = 0; index < n_layers; ++index) {
    const Layer& layer = layers[size_t(index)];
    if (c.norm_first) norm(layer.attn_norm, x, M, h);
    const std::array<Output, 3> qkv = {{{q, q_width()}, {k, kv_width()}, {v, kv_width()}}};
    run_group(index, Input::attn_in, *layer.qkv, c.norm_first ? h : x, M, position, qkv);
    if (c.qk_norm) {
      kernels::rms_norm(pool, q, layer.q_norm.data(), c.norm_eps, M * c.n_heads, c.head_dim, q);
      kernels::rms_norm(pool, k, layer.k_norm.data(), c.norm_eps, M * c.n_kv_heads, c.head_dim, k);
    }
    if (c.positions == Positions::rope) {
      kernels::rope(pool, q, M, c.n_heads, c.head_dim, q_width(), cos, sin, c.rope.n_rot, c.rope.adjacent);
      kernels::rope(pool, k, M, c.n_kv_heads, c.head_dim, kv_width(), cos, sin, c.rope.n_rot, c.rope.adjacent);
    }
    for (size_t s = 0; s < sessions.size(); ++s) {
      const int64_t row = int64_t(s) * each;
      kernels::kv_store(pool, sessions[s]->layer(index), position, each, k + row * kv_width(), kv_width(),
                        v + row * kv_width(), kv_width());
    }

    // Past the last layer's keys and values only the wanted tokens matter.
    if (index + 1 == n_layers) {
      if (wanted == 0) return;
      rows = wanted;
      residual = x + (M - wanted) * c.n_embd;
    }
    const int64_t skipped = M - rows;
    kernels::AttentionArgs args;
    args.q_stride = q_width();
    args.M = each - skipped;
    args.n_heads = c.n_heads;
    args.position = position + skipped;
    args.window = c.window;
    args.scale = scale;
    args.out_stride = q_width();
    for (size_t s = 0; s < sessions.size(); ++s) {
      args.q = q + (int64_t(s) * each + skipped) * q_width();
      args.cache = sessions[s]->layer(index);
      args.out = attended + int64_t(s) * args.M * q_width();
      kernels::attention(pool, args);
    }
    const std::array<Output, 1> out = {{{h, c.n_embd}}};
    run_group(index, Input::attn_out, *layer.o, attended, rows, position + skipped, out);
    kernels::add(pool, h, rows * c.n_embd, residual);
    if (!c.norm_first) norm(layer.attn_norm, residual, rows, residual);

    if (c.norm_first) norm(layer.ffn_norm, residual, rows, h);
    const float* input = c.norm_first ? h : residual;
    const bool gated = c.mlp == Mlp::swiglu;
    if (gated) {
      const std::array<Output, 2> both = {{{gate, c.n_ff}, {up, c.n_ff}}};
      run_group(index, Input::ffn_in, *layer.up, input, rows, position + skipped, both);
    } else {
      const std::array<Output, 1> one = {{{gate, c.n_ff}}};
      run_group(index, Input::ffn_in, *layer.up, input, rows, position + skipped, one);
    }
    apply_activation(c, pool, gate, gated ? up : gate, rows * c.n_ff, gate);
    run_group(index, Input::ffn_down, *layer.down, gate, rows, position + skipped, out);
    kernels::add(pool, h, rows * c.n_embd, residual);
    if (!c.norm_first) norm(layer.ffn_norm, residual, rows, residual);
  }
}

void Decoder::Impl::run_head(int64_t row, int64_t count) {
  const float* in = x + row * config.n_embd;
  if (output_norm) {
    norm(*output_norm, in, count, h);
    in = h;
  }
  if (project_out) {
    const std::array<Output, 1> out = {{{word, n_word}}};
    project_out->run({in, count, config.n_embd}, out);
    in = word;
  }
  const std::array<Output, 1> out = {{{logits, config.n_vocab}}};
  head->run({in, count, n_word}, out);
}

void Decoder::Impl::check_ids(const Session& session, std::span<const int32_t> ids, int64_t total) const {
  if (total > session.capacity() - session.length())
    throw Error(
        "{} tokens do not fit: the context holds {} and {} are taken; ask for a larger one (the model's limit is {}) "
        "or shorten the text",
        total, session.capacity(), session.length(), config.n_ctx);
  for (const int32_t id : ids)
    if (id < 0 || id >= config.n_vocab)
      throw Error("token id {} is outside the model's vocabulary of {}", id, config.n_vocab);
}

void Decoder::Impl::forward_each(std::span<Session* const> sessions, std::span<const int32_t> ids) {
  static_assert(kMostSessions <= kHeadRows && kMostSessions <= kBatch);
  const auto M = int64_t(sessions.size());
  if (M < 1 || M > kMostSessions || int64_t(ids.size()) != M)
    throw Error("{} tokens for {} sessions; expected one for each of 1 to {}", ids.size(), M, kMostSessions);
  const int64_t position = sessions[0]->length();
  for (const Session* session : sessions) {
    if (session->length() != position)
      throw Error("sessions of {} and {} tokens cannot run together", position, session->length());
    check_ids(*session, ids, 1);
  }
  one_token = M == 1;
  n_sessions = M;
  embed(ids, position);
  rotary_tables(M, position);
  run_layers(sessions, M, M);
  n_sessions = 1;
  for (Session* session : sessions) ++session->length_;
  run_head(0, M);
}

void Decoder::Impl::forward(Session& session, std::span<const int32_t> ids, Want want, const LogitsSink* sink) {
  const auto total = int64_t(ids.size());
  check_ids(session, ids, total);
  one_token = total == 1;
  n_sessions = 1;
  for (int64_t first = 0; first < total; first += kBatch) {
    const int64_t M = std::min(kBatch, total - first);
    const bool last_batch = first + M == total;
    const int64_t wanted = want == Want::all ? M : want == Want::last && last_batch ? 1 : 0;
    embed(ids.subspan(size_t(first), size_t(M)), session.length());
    rotary_tables(M, session.length());
    Session* const one = &session;
    run_layers({&one, 1}, M, want == Want::layers ? M : wanted);
    session.length_ += M;
    for (int64_t row = M - wanted; row < M; row += kHeadRows) {
      const int64_t count = std::min(kHeadRows, M - row);
      run_head(row, count);
      if (sink != nullptr) (*sink)(first + row, count, logits);
    }
  }
}

// ---- Session ----

Session::Session(const Decoder& decoder, int64_t capacity, kernels::KvType type) : capacity_(capacity) {
  const Config& c = decoder.config();
  if (capacity < 1 || capacity > c.n_ctx)
    throw Error("a context of {} tokens was asked for; this model takes 1 to {}", capacity, c.n_ctx);
  const int64_t n_layers = decoder.n_layers();
  const int64_t half = (c.n_kv_heads * capacity * kernels::kv_head_bytes(type, c.head_dim) + 63) / 64 * 64;
  const auto total = checked_mul(2 * half, n_layers);
  if (!total) throw Error("a context of {} tokens does not fit any memory", capacity);
  // Each head's keys fill from their own start: with huge pages the first token would touch, and zero, most of a cache
  // whose heads are small.
  constexpr int64_t kHugeHead = int64_t{8} << 20;
  buffer_ = HugeBuffer(size_t(*total), capacity * kernels::kv_head_bytes(type, c.head_dim) >= kHugeHead);
  std::byte* next = buffer_.data();
  for (int64_t index = 0; index < n_layers; ++index, next += 2 * half)
    layers_.push_back({type, next, next + half, capacity, c.n_kv_heads, c.head_dim});
}

void Session::truncate(int64_t length) {
  if (length < 0 || length > length_) throw Error("cannot truncate {} tokens to {}", length_, length);
  length_ = length;
}

void Session::copy(const Session& other, int64_t same) {
  if (layers_.size() != other.layers_.size() || capacity_ != other.capacity_ || buffer_.size() != other.buffer_.size())
    throw Error("a session of {} tokens' capacity cannot become one of {} of another kind", capacity_, other.capacity_);
  if (same < 0 || same > std::min(length_, other.length_))
    throw Error("sessions of {} and {} tokens cannot agree in {}", length_, other.length_, same);
  for (size_t index = 0; index < layers_.size(); ++index) {
    const kernels::KvLayer &to = layers_[index], &from = other.layers_[index];
    const int64_t bytes = kernels::kv_head_bytes(to.type, to.head_dim);
    for (int64_t h = 0; h < to.n_kv_heads; ++h) {
      const int64_t place = (h * capacity_ + same) * bytes, count = (other.length_ - same) * bytes;
      std::memcpy(static_cast<std::byte*>(to.keys) + place, static_cast<const std::byte*>(from.keys) + place,
                  size_t(count));
      std::memcpy(static_cast<std::byte*>(to.values) + place, static_cast<const std::byte*>(from.values) + place,
                  size_t(count));
    }
  }
  length_ = other.length_;
}

kernels::KvLayer Session::layer(int64_t index) const { return layers_[size_t(index)]; }

// ---- Decoder ----

Decoder::Decoder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Decoder::~Decoder() = default;

std::unique_ptr<Decoder> Decoder::load(const io::Checkpoint& checkpoint, ThreadPool& pool, const LoadOptions& options) {
  auto impl = std::make_unique<Impl>(pool);
  impl->config = read_config(checkpoint);
  impl->bind(checkpoint, options);
  impl->take_workspace();
  return std::unique_ptr<Decoder>(new Decoder(std::move(impl)));
}

const Config& Decoder::config() const { return impl_->config; }
ThreadPool& Decoder::pool() const { return impl_->pool; }
int64_t Decoder::n_layers() const { return int64_t(impl_->layers.size()); }

void Decoder::forward(Session& session, std::span<const int32_t> ids, Want want, const LogitsSink& sink) {
  impl_->forward(session, ids, want, sink ? &sink : nullptr);
}

std::span<const float> Decoder::forward(Session& session, std::span<const int32_t> ids) {
  if (ids.empty()) throw Error("no tokens to run: there are no logits of an empty text");
  impl_->forward(session, ids, Want::last, nullptr);
  return {impl_->logits, size_t(impl_->config.n_vocab)};
}

std::span<const float> Decoder::forward(std::span<Session* const> sessions, std::span<const int32_t> ids) {
  impl_->forward_each(sessions, ids);
  return {impl_->logits, sessions.size() * size_t(impl_->config.n_vocab)};
}

std::span<const float> Decoder::run_first(Session& session, std::span<const int32_t> ids, bool may_skip) {
  Impl& d = *impl_;
  const auto M = int64_t(ids.size());
  assert(!d.head && M > 0 && M <= kMostFirst);
  d.check_ids(session, ids, M);
  d.one_token = M == 1 && may_skip;
  d.n_sessions = 1;
  d.embed(ids, session.length());
  d.rotary_tables(M, session.length());
  Session* const one = &session;
  d.run_layers({&one, 1}, M, M);
  session.length_ += M;
  return {d.x, size_t(M * d.config.n_embd)};
}

void check_sparsity(const SparsityOptions& options, const Config& config) {
  const Thresholds& thresholds = options.thresholds;
  const auto n_layers = size_t(config.n_layers);
  if (thresholds.t.size() != n_layers || (!thresholds.norms.empty() && thresholds.norms.size() != n_layers))
    throw Error("thresholds of {} layers for a model of {}", thresholds.t.size(), n_layers);
  const auto widths = input_widths(config);
  for (const auto& layer : thresholds.norms)
    for (size_t i = 0; i < kInputs; ++i)
      if (int64_t(layer[i].size()) != widths[i])
        throw Error("{} column norms of {} for {} inputs", layer[i].size(), name_of(Input(i)), widths[i]);
  if (options.dense_prefix < 0) throw Error("a dense prefix of {} tokens; it must be 0 or more", options.dense_prefix);
}

void Decoder::set_sparsity(std::optional<SparsityOptions> options) {
  Impl& impl = *impl_;
  if (options) check_sparsity(*options, impl.config);
  if (options) {
    Thresholds& thresholds = options->thresholds;
    for (size_t l = 0; l < impl.layers.size(); ++l)
      for (size_t i = 0; i < kInputs; ++i)
        if (l < thresholds.realised.size() && thresholds.realised[l][i] < impl.layers[l].dense_below[i])
          thresholds.t[l][i] = 0;
  }
  impl.sparsity = std::move(options);
  clear_counts();
}

void Decoder::clear_counts() {
  Impl& impl = *impl_;
  impl.counts = {};
  impl.counts.layers.resize(impl.layers.size());
  for (const Layer& layer : impl.layers)
    impl.counts.bytes.push_back(
        {layer.qkv->weight_bytes(), layer.o->weight_bytes(), layer.up->weight_bytes(), layer.down->weight_bytes()});
}

const SparsityCounts& Decoder::sparsity_counts() const { return impl_->counts; }
const std::optional<SparsityOptions>& Decoder::sparsity() const { return impl_->sparsity; }
void Decoder::set_threshold(int64_t layer, Input input, float t) {
  impl_->sparsity.value().thresholds.t[size_t(layer)][size_t(input)] = t;
}
void Decoder::set_observer(Observer observer) { impl_->observer = std::move(observer); }

void Decoder::embed(std::span<const int32_t> ids, int64_t position, float* x) {
  for (size_t first = 0; first < ids.size(); first += kBatch) {
    const auto part = ids.subspan(first, std::min<size_t>(kBatch, ids.size() - first));
    impl_->embed(part, position + int64_t(first));
    std::copy_n(impl_->x, int64_t(part.size()) * impl_->config.n_embd, x + int64_t(first) * impl_->config.n_embd);
  }
}

double SparsityCounts::layer_share(int64_t layer) const {
  std::array<float, kInputs> shares;
  for (size_t i = 0; i < kInputs; ++i) shares[i] = float(layers[size_t(layer)][i].share());
  return skipped_share(shares, bytes[size_t(layer)]);
}

double SparsityCounts::share() const {
  PerInput shares(layers.size());
  for (size_t l = 0; l < layers.size(); ++l)
    for (size_t i = 0; i < kInputs; ++i) shares[l][i] = float(layers[l][i].share());
  return skipped_share(shares, bytes);
}

int64_t Decoder::weight_bytes() const {
  int64_t total = 0;
  for (const auto* group : {&impl_->project_in, &impl_->project_out, &impl_->head})
    if (*group) total += (*group)->weight_bytes();
  for (const Layer& layer : impl_->layers)
    for (const auto* group : {&layer.qkv, &layer.o, &layer.up, &layer.down}) total += (*group)->weight_bytes();
  return total;
}

int64_t Decoder::prepared_bytes() const {
  int64_t total = 0;
  for (const auto* group : {&impl_->project_in, &impl_->project_out, &impl_->head})
    if (*group) total += (*group)->prepared_bytes();
  for (const Layer& layer : impl_->layers)
    for (const auto* group : {&layer.qkv, &layer.o, &layer.up, &layer.down}) total += (*group)->prepared_bytes();
  return total;
}

std::string Decoder::explain() const {
  std::string out;
  const auto line = [&](const LinearGroup& group) {
    out += group.explain();
    if (!out.empty() && out.back() != '\n') out += '\n';
  };
  const Layer& layer = impl_->layers.front();
  for (const auto* group : {&layer.qkv, &layer.o, &layer.up, &layer.down}) line(**group);
  if (impl_->head) line(*impl_->head);
  return out;
}

}  // namespace lacuna::model
