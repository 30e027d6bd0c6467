#include "model/cuda_decoder.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/progress.h"
#include "kernels/cuda/communicator.h"
#include "kernels/cuda/groups.h"
#include "kernels/cuda/ops.h"
#include "kernels/cuda/plan_search.h"
#include "model/binder.h"
#include "model/cuda_beams.h"
#include "model/cuda_shard.h"
#include "model/tensor_split.h"

namespace lacuna::model {
namespace {

using kernels::WeightView;

/// What next() leaves to the device.
constexpr int64_t kMostCandidates = 2048, kMostVocabulary = int64_t{1} << 20;

using Zigzags = std::vector<cuda::GemvPlan>;

/// A search's progress, a step for each stage.
struct SearchBar {
  template <class Stages>
  SearchBar(bool progress, std::string what, const Stages& stages) {
    if (!progress) return;
    int64_t steps = 0;
    for (const auto& of_product : stages) steps += int64_t(of_product.size());
    bar.emplace(std::move(what), options.rounds * steps, "steps");
    options.step = [this] { bar->add(1); };
  }
  SearchBar(const SearchBar&) = delete;
  SearchBar& operator=(const SearchBar&) = delete;

  std::optional<Progress> bar;
  cuda::SearchOptions options;
};

}  // namespace

struct CudaDecoder::Impl {
  Config config;
  int64_t context = 0, position = 0, batch_weight_bytes = 0;
  std::optional<SparsityOptions> sparsity;
  int64_t sparse_tokens = 0;
  cuda::Plans plans;
  bool deterministic = false;

  std::deque<Card> cards;
  std::vector<std::unique_ptr<CudaShard>> shards;  // in order of the cards, as many on each
  std::optional<TensorSplit> split;
  std::unique_ptr<cuda::Communicator> communicator;
  bool lost = false;  // the devices do not hear each other any more

  /// The first layers, on the CPU; nullptr: none.
  int64_t cpu_layers = 0;
  std::unique_ptr<Decoder> cpu;
  std::optional<Session> session;

  bool moved = false;  // the devices have not been told the position yet
  std::vector<float> host_logits, share_of_logits;
  cuda::Buffer candidates, candidates_workspace, penalized;  // of next(), made when it first needs them
  std::optional<CudaInputsSpace> observed;                   // of run_observed()
  std::vector<cuda::TopKCandidate> found;
  std::vector<Candidate> chosen;
  std::vector<cuda::Graph> dense_token, sparse_token;  // of each card; empty: none

  /// The one that the host reads.
  CudaShard& lead() { return *shards.front(); }
  const CudaShard& lead() const { return *shards.front(); }
  int64_t n_layers() const { return int64_t(lead().layers.size()); }

  /// Calls f(shard) for all, each with its device in use.
  template <class F>
  void each(const F& f) {
    for (const auto& shard : shards) {
      shard->card.device.use();
      f(*shard);
    }
  }
  /// Work of several devices: where one fails, the others' exchanges are ended, and the decoder with them.
  template <class F>
  void guarded(const F& f) {
    try {
      f();
    } catch (...) {
      lose();
      throw;
    }
  }
  void lose();
  /// Waits for all devices.
  void wait();
  /// Every card gets what the shards of the others wrote. data: [shards][stride] of a card.
  void exchange(const std::function<float*(Card&)>& data, int64_t stride);

  /// Runs ids through the CPU's layers, if there are any, and gives the device what they made. sparse: of one id.
  void run_on_cpu(std::span<const int32_t> of, bool sparse);
  /// Of a layer on the device.
  LayerThresholds thresholds(int64_t layer, bool sparse) const;
  /// Whether no plan of any shard runs the input dense.
  bool skips(int64_t layer, size_t input) const;
  /// The launches of a token.
  void record(bool sparse);
  std::vector<cuda::Graph> recorded(bool sparse);
  void record_sparse();
  /// Of sparse tokens; 0: they are dense.
  int percent() const { return sparsity ? std::clamp(int(std::lround(100 * sparsity->thresholds.level)), 1, 99) : 0; }
  /// Milliseconds of a token from position 0 on with the plans as they are. One card.
  double time_token(bool sparse);
  void check_room(std::span<const int32_t> ids, int64_t count) const;
  /// Throws Error unless the whole model is on one device, unsplit.
  void check_whole() const;
  /// Whether several tokens at once leave inputs out.
  bool masks_batches() const { return sparsity && sparsity->mask_batches; }
  /// Whether a token that may skip would.
  bool next_is_sparse() const;
  void launch(bool sparse);
  void launch(std::vector<cuda::Graph>& token);
  void tell_position();
  void upload_ids(std::span<const int32_t> of);
  /// Runs a token; its logits stay on the devices.
  void step(int32_t id, bool may_skip);
  std::span<const float> read_logits();
  /// Runs ids; the last one's logits stay on the devices.
  void run_ids(std::span<const int32_t> of);
  /// Runs tokens at once, dense but for what observers of the shards do, as far as the residual stream.
  void run_batch(std::span<const int32_t> of);
  /// Logits of the last token of the batch's M, left on the devices.
  void batch_end(int64_t M);
  /// Logits of the batch's M tokens.
  void score_batch(int64_t M, const Decoder::LogitsSink& sink);
  /// Runs tokens in batches as they fit and calls after(first, n) for the n from `first` on: in the residual stream of
  /// the batch, or, where n is 1, with logits. sparse: as set_sparsity() says, one by one without mask_batches and
  /// with layers on the CPU; else dense.
  void run_batches(std::span<const int32_t> of, bool sparse,
                   const std::function<void(int64_t first, int64_t n)>& after);
  /// Observers of the shards go whatever happens.
  struct Observing {
    Impl& d;
    ~Observing() {
      for (const auto& shard : d.shards) shard->observer = {};
    }
  };
  /// A batch in which each token leaves out what it would leave out alone; without layers on the CPU.
  void run_masked_batch(std::span<const int32_t> of);

  // ---- loading ----
  /// NCCL connects devices in the first exchange of a size, which cannot be recorded.
  void connect();
  /// Throws DoesNotFit, before anything is uploaded.
  void check_memory(std::span<const LayerWeights> layers, const WeightView& embedding, const WeightView& output,
                    bool tied, const std::string& path);
};

void CudaDecoder::Impl::lose() {
  if (cards.size() == 1) return;
  lost = true;
  dense_token.clear(), sparse_token.clear();  // they hold the communicator
  communicator->abort();
}

void CudaDecoder::Impl::wait() {
  if (lost) throw Error("the decoder has lost its devices to an earlier error; load the model again");
  guarded([&] { communicator->wait(); });
}

void CudaDecoder::Impl::exchange(const std::function<float*(Card&)>& data, int64_t stride) {
  if (cards.size() == 1) return;
  cards.front().device.use();
  cards.front().mark(Kind::exchange);
  std::vector<float*> of_cards;
  for (Card& card : cards) of_cards.push_back(data(card));
  communicator->gather(of_cards, stride * int64_t(shards.size() / cards.size()));
}

void CudaDecoder::Impl::connect() {
  const int64_t tokens = lead().space.tokens;
  guarded([&] {
    exchange([](Card& card) { return card.o; }, cards.front().sum_stride);
    exchange([](Card& card) { return card.logits.as<float>(); }, cards.front().logit_stride);
    for (const int64_t M : {kLeastBatch, tokens})
      if (M <= tokens)
        exchange([](Card& card) { return card.batch_sums.as<float>(); }, CudaShard::batch_stride(M, config.n_embd));
  });
  wait();
}

void CudaDecoder::Impl::run_on_cpu(std::span<const int32_t> of, bool sparse) {
  if (!cpu) return;
  session->truncate(position);
  lead().handed.upload(std::as_bytes(cpu->run_first(*session, of, sparse)));
}

bool CudaDecoder::Impl::skips(int64_t layer, size_t input) const {
  return std::ranges::all_of(shards,
                             [&](const auto& shard) { return shard->layers[size_t(layer)].readers()[input]->skips(); });
}

LayerThresholds CudaDecoder::Impl::thresholds(int64_t layer, bool sparse) const {
  LayerThresholds out = {};
  for (size_t input = 0; sparse && input < size_t(kInputs); ++input)
    if (skips(layer, input)) out[input] = sparsity->thresholds.t[size_t(cpu_layers + layer)][input];
  return out;
}

void CudaDecoder::Impl::record(bool sparse) {
  const int64_t stride = cards.front().sum_stride;
  each([](CudaShard& shard) { shard.record_embedding(1, shard.x); });
  for (int64_t layer = 0; layer < n_layers(); ++layer) {
    const LayerThresholds t = thresholds(layer, sparse);
    each([&](CudaShard& shard) { shard.record_attention(layer, t); });
    exchange([](Card& card) { return card.o; }, stride);
    each([&](CudaShard& shard) { shard.record_mlp(layer, t); });
    exchange([](Card& card) { return card.down; }, stride);
  }
  each([](CudaShard& shard) { shard.record_head(shard.x, shard.card.down); });
  exchange([](Card& card) { return card.logits.as<float>(); }, cards.front().logit_stride);
  each([](CudaShard& shard) { shard.record_choice(); });
  Card& card = cards.front();
  if (card.marks == nullptr) return;
  card.device.use();
  card.marks->marks.emplace_back().record(card.stream);
}

std::vector<cuda::Graph> CudaDecoder::Impl::recorded(bool sparse) {
  std::vector<cuda::Stream*> streams;
  for (Card& card : cards) streams.push_back(&card.stream);
  std::vector<cuda::Graph> out;
  guarded([&] { out = cuda::Graph::together(streams, [&] { record(sparse); }); });
  return out;
}

void CudaDecoder::Impl::record_sparse() {
  sparse_token.clear();
  for (const auto& shard : shards)
    if (shard->counts.bytes() > 0) shard->counts.fill(0);
  sparse_tokens = 0;
  if (!sparsity) return;
  try {
    sparse_token = recorded(true);
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

bool CudaDecoder::Impl::next_is_sparse() const { return !sparse_token.empty() && position >= sparsity->dense_prefix; }

void CudaDecoder::Impl::launch(std::vector<cuda::Graph>& token) {
  if (token.empty()) throw Error("the decoder has lost its graph to an earlier error; load the model again");
  guarded([&] {
    for (size_t i = 0; i < cards.size(); ++i) {
      cards[i].device.use();
      token[i].launch(cards[i].stream);
    }
  });
}

void CudaDecoder::Impl::launch(bool sparse) {
  launch(sparse ? sparse_token : dense_token);
  sparse_tokens += sparse;
  ++position;
}

void CudaDecoder::Impl::tell_position() {
  const auto at = int32_t(position);
  for (const auto& shard : shards) shard->positions.upload(std::as_bytes(std::span(&at, 1)));
  moved = false;
}

void CudaDecoder::Impl::upload_ids(std::span<const int32_t> of) {
  for (const auto& shard : shards) shard->ids.upload(std::as_bytes(of));
}

void CudaDecoder::Impl::step(int32_t id, bool may_skip) {
  wait();
  const bool sparse = may_skip && next_is_sparse();
  run_on_cpu({&id, 1}, sparse);
  if (moved) tell_position();
  upload_ids({&id, 1});
  launch(sparse);
}

std::span<const float> CudaDecoder::Impl::read_logits() {
  wait();
  const auto to = std::span(host_logits).first(size_t(config.n_vocab));
  cards.front().logits.download(std::as_writable_bytes(to));
  return to;
}

void CudaDecoder::Impl::run_batch(std::span<const int32_t> of) {
  const auto M = int64_t(of.size());
  wait();
  run_on_cpu(of, false);
  upload_ids(of);
  tell_position();
  guarded([&] {
    const auto add = [&] {
      exchange([](Card& card) { return card.batch_sums.as<float>(); }, CudaShard::batch_stride(M, config.n_embd));
      each([&](CudaShard& shard) { shard.batch_add(M); });
    };
    each([&](CudaShard& shard) { shard.record_embedding(M, shard.batch.x); });
    for (int64_t layer = 0; layer < n_layers(); ++layer) {
      each([&](CudaShard& shard) { shard.batch_attention(layer, M); });
      add();
      each([&](CudaShard& shard) { shard.batch_mlp(layer, M); });
      add();
    }
  });
  position += M;
  moved = true;
}

void CudaDecoder::Impl::batch_end(int64_t M) {
  guarded([&] {
    each([&](CudaShard& shard) { shard.record_head(shard.batch.x + (M - 1) * config.n_embd, nullptr); });
    exchange([](Card& card) { return card.logits.as<float>(); }, cards.front().logit_stride);
  });
}

void CudaDecoder::Impl::score_batch(int64_t M, const Decoder::LogitsSink& sink) {
  const int64_t at_once = lead().space.logit_tokens, N = config.n_vocab;
  std::vector<cuda::Operand> inputs;
  each([&](CudaShard& shard) { inputs.push_back(shard.batch_head_inputs(M)); });
  host_logits.resize(size_t(std::min(M, at_once) * N));
  for (int64_t begin = 0; begin < M; begin += at_once) {
    const int64_t count = std::min(at_once, M - begin);
    each([&](CudaShard& shard) { shard.batch_head(inputs[size_t(shard.index)], begin, count); });
    wait();
    for (const auto& shard : shards) {
      const Share share = shard->vocabulary;
      const std::span<float> all = std::span(host_logits).first(size_t(count * N));
      if (shards.size() == 1) {
        shard->batch_logits.download(std::as_writable_bytes(all));
        continue;
      }
      share_of_logits.resize(size_t(count * share.count));
      shard->batch_logits.download(std::as_writable_bytes(std::span(share_of_logits)));
      for (int64_t m = 0; m < count; ++m)
        std::copy_n(&share_of_logits[size_t(m * share.count)], share.count, &all[size_t(m * N + share.first)]);
    }
    sink(begin, count, host_logits.data());
  }
}

void CudaDecoder::Impl::run_masked_batch(std::span<const int32_t> of) {
  const Observing guard{*this};
  for (const auto& shard : shards)
    shard->observer = [this, &shard = *shard](int64_t layer, Input input, float* x, int64_t M, int64_t K) {
      if (skips(layer, size_t(input)))
        shard.mask(layer, input, x, M, K, sparsity->thresholds.t[size_t(layer)][size_t(input)], position,
                   sparsity->dense_prefix);
    };
  const int64_t M = int64_t(of.size()), dense = std::clamp(sparsity->dense_prefix - position, int64_t{0}, M);
  run_batch(of);
  sparse_tokens += M - dense;
}

void CudaDecoder::Impl::run_batches(std::span<const int32_t> of, bool sparse,
                                    const std::function<void(int64_t first, int64_t n)>& after) {
  const bool one_by_one = sparse && (cpu || !sparsity->mask_batches);
  for (int64_t first = 0, left = int64_t(of.size()); left > 0;) {
    int64_t n = one_by_one || left < kLeastBatch ? 1 : std::min(left, lead().space.tokens);
    // A rest of single tokens would add in any order: the batch before leaves it enough to be one.
    if (const int64_t rest = left - n; sparse && rest > 0 && rest < kLeastBatch && n >= 2 * kLeastBatch)
      n -= kLeastBatch - rest;
    if (n == 1)
      step(of[size_t(first)], sparse);
    else if (sparse)
      run_masked_batch(of.subspan(size_t(first), size_t(n)));
    else
      run_batch(of.subspan(size_t(first), size_t(n)));
    after(first, n);
    first += n;
    left -= n;
  }
}

void CudaDecoder::Impl::check_memory(std::span<const LayerWeights> layers, const WeightView& embedding,
                                     const WeightView& output, bool tied, const std::string& path) {
  const bool is_split = shards.size() > 1;
  const int64_t embedding_bytes = cpu_layers == 0 && (!tied || is_split) ? prepared_bytes({&embedding, 1}) : 0;
  const auto floats = [](int64_t count) { return count * int64_t(sizeof(float)); };
  for (Card& card : cards) {
    int64_t weights = embedding_bytes, cache = 0, heads = 0, rest = 0, handed = 0;
    std::vector<int64_t> layer_bytes(layers.size());  // weights and cache
    for (const auto& shard : shards) {
      if (&shard->card != &card) continue;
      const Config& c = shard->config;
      WeightView head = output;
      head.shape.N = shard->vocabulary.count;
      heads += prepared_bytes({&head, 1});
      const int64_t cache_bytes = 2 * c.n_kv_heads * c.head_dim * context * int64_t(sizeof(f16));
      std::array<int64_t, kInputs> outputs = {};
      for (size_t l = 0; l < layers.size(); ++l) {
        int64_t bytes = 0;
        outputs = {};
        for (size_t input = 0; input < size_t(kInputs); ++input) {
          const auto parts = split->outline(layers[l], Input(input), shard->index);
          bytes += prepared_bytes(parts);
          for (const WeightView& part : parts) outputs[input] += padded(part.shape.N);
        }
        layer_bytes[l] += bytes + cache_bytes;
        if (int64_t(l) >= cpu_layers) weights += bytes, cache += cache_bytes;
      }
      const BatchSpace space(c, shard->vocabulary.count, context, outputs[size_t(Input::attn_in)],
                             outputs[size_t(Input::ffn_in)], batch_weight_bytes);
      handed = space.x;
      const auto widths = input_widths(c);
      rest += floats(space.tokens * *std::max_element(widths.begin(), widths.end()));  // reserve_observed()
      rest += floats(c.n_vocab + context * c.rope.n_rot) + space.bytes() + (cpu_layers > 0 ? space.x : 0);
    }
    rest += int64_t{64} << 20;
    if (is_split)  // what is exchanged: entries of all shards
      rest += floats(int64_t(shards.size()) * (2 * padded(config.n_embd) + card.logit_stride +
                                               CudaShard::batch_stride(std::min(kMostBatch, context), config.n_embd)));
    weights += heads;
    try {
      card.device.require(
          weights + cache + rest,
          fmt::format("{}: {} MiB of weights, {} MiB of key-value cache for {} tokens and {} MiB of work space{}", path,
                      weights >> 20, cache >> 20, context, rest >> 20,
                      is_split ? fmt::format(" on device {}", card.device.info().index) : ""));
    } catch (cuda::DoesNotFit& error) {
      if (is_split) throw;
      const int64_t beside_cache = card.device.free_bytes() - weights - rest;
      if (cache > 0 && beside_cache > 0) error.positions = std::min(context - 1, beside_cache / (cache / context));
      int64_t left = card.device.free_bytes() - heads - rest - handed;
      for (auto bytes = layer_bytes.rbegin(); error.layers + 1 < config.n_layers && left >= *bytes;
           ++bytes, ++error.layers)
        left -= *bytes;
      throw;
    }
  }
}

CudaDecoder::CudaDecoder(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaDecoder::~CudaDecoder() {
  try {
    if (!impl_->lost) impl_->wait();
  } catch (...) {  // nothing more can be done with the devices
  }
}

std::unique_ptr<CudaDecoder> CudaDecoder::load(const io::Checkpoint& checkpoint, ThreadPool& pool, cuda::Device& device,
                                               const CudaDecoderOptions& options) {
  cuda::Device* const devices[] = {&device};
  return load(checkpoint, pool, devices, options);
}

std::unique_ptr<CudaDecoder> CudaDecoder::load(const io::Checkpoint& checkpoint, ThreadPool& pool,
                                               std::span<cuda::Device* const> devices,
                                               const CudaDecoderOptions& options) {
  auto impl = std::make_unique<Impl>();
  Impl& d = *impl;
  d.config = read_config(checkpoint);
  const Config& c = d.config;
  const auto refuse = [&](const char* what) { throw Error("--device cuda: {}: {}", checkpoint.path(), what); };
  if (c.positions != Positions::rope) refuse("learned positions do not run on CUDA yet");
  if (!c.norm_first) refuse("norms after their half blocks do not run on CUDA yet");
  if (c.head_dim % 8 != 0 || c.head_dim > 256) refuse("heads must have a multiple of 8 and at most 256 values on CUDA");
  d.deterministic = options.deterministic;
  d.batch_weight_bytes = options.batch_weight_bytes;
  if (!options.deterministic) d.plans = options.plans;
  d.context = options.context > 0 ? options.context : c.n_ctx;
  if (d.context > c.n_ctx)
    throw Error("a context of {} tokens was asked for; this model takes 1 to {}", d.context, c.n_ctx);
  if (options.gpu_layers < 0 || options.gpu_layers > c.n_layers)
    throw Error("{} layers on the device were asked for; this model has {}", options.gpu_layers, c.n_layers);
  d.cpu_layers = options.gpu_layers > 0 ? c.n_layers - options.gpu_layers : 0;
  const auto n_devices = int64_t(devices.size()), n_shards = options.shards > 0 ? options.shards : n_devices;
  if (n_shards % n_devices != 0)
    throw Error("{} shards cannot be shared out over {} devices; ask for a multiple of {}", n_shards, n_devices,
                n_devices);
  if (n_shards > 1 && d.cpu_layers > 0)
    throw Error("a model that is split into shards has no layers on the CPU; leave out --gpu-layers");
  for (const cuda::Device* device : devices)
    if (device->info().name != devices[0]->info().name)
      throw Error(
          "--device cuda: device {} is {}, but device {} is {}; a model is split over devices of one kind, so that "
          "they "
          "compute the same bits",
          devices[0]->info().index, devices[0]->info().name, device->info().index, device->info().name);

  std::deque<std::vector<float>> biases;
  Binder binder(checkpoint, biases);
  const int64_t q = c.n_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
  const bool gated = c.mlp == Mlp::swiglu;
  const io::Tensor& words = binder.matrix("token_embd.weight", c.n_vocab, c.n_embd);
  binder.ignore("rope_freqs.weight");  // read by the configuration
  std::vector<LayerWeights> layers;
  for (int64_t index = 0; index < c.n_layers; ++index) {
    const auto name = [&](const char* part) { return fmt::format("blk.{}.{}", index, part); };
    LayerWeights& weights = layers.emplace_back();
    if (gated) weights[size_t(Input::ffn_in)].push_back(binder.weight(name("ffn_gate"), c.n_ff, c.n_embd));
    weights[size_t(Input::ffn_in)].push_back(binder.weight(name("ffn_up"), c.n_ff, c.n_embd));
    weights[size_t(Input::attn_in)] = {binder.weight(name("attn_q"), q, c.n_embd),
                                       binder.weight(name("attn_k"), kv, c.n_embd),
                                       binder.weight(name("attn_v"), kv, c.n_embd)};
    weights[size_t(Input::attn_out)] = {binder.weight(name("attn_output"), c.n_embd, q)};
    weights[size_t(Input::ffn_down)] = {binder.weight(name("ffn_down"), c.n_embd, c.n_ff)};
  }
  WeightView output{words.name, words.layout, words.shape, words.bytes, {}, words.params};
  const bool tied = !binder.has("output.weight");
  const WeightView embedding = output;
  if (!tied) output = binder.weight("output", c.n_vocab, c.n_embd);

  // Before anything is uploaded: does it run, can it be split, does it fit?
  for (const WeightView* table : {&embedding, &std::as_const(output)})
    if (table->layout->zigzag || cuda::is_group_layout(*table->layout))
      throw Error("--device cuda: {}: is {}; embedding and head must be in a row layout", table->name,
                  table->layout->name);
  d.split.emplace(c, layers, n_shards);
  std::vector<cuda::Communicator::Member> members;
  for (cuda::Device* device : devices) {
    Card& card = d.cards.emplace_back(*device);
    card.logit_stride = d.split->rows(0, c.n_vocab).count;
    members.push_back({&card.device, &card.stream});
  }
  for (int64_t shard = 0; shard < n_shards; ++shard) {
    Card& card = d.cards[size_t(shard / (n_shards / n_devices))];
    card.device.use();
    d.shards.push_back(std::make_unique<CudaShard>(c, *d.split, shard, card, d.plans, d.context));
    if (d.shards.back()->vocabulary.count < 1)
      throw Error("{}: {} outputs are too few for {} shards; ask for fewer", output.name, c.n_vocab, n_shards);
  }
  d.communicator = cuda::make_communicator(members);
  d.check_memory(layers, embedding, output, tied, checkpoint.path());

  std::optional<Progress> progress;
  if (d.cpu_layers > 0) {
    LoadOptions first = options.cpu;
    first.first_layers = d.cpu_layers;
    first.progress = options.progress;
    first.deterministic = options.deterministic;
    d.cpu = Decoder::load(checkpoint, pool, first);
    d.session.emplace(*d.cpu, d.context);
  }
  if (options.progress) progress.emplace("Uploading", c.n_layers - d.cpu_layers + 1, "layers");
  d.each([&](CudaShard& shard) {
    const ShardWeight head = d.split->cut_rows(output, shard.vocabulary, pool);
    shard.head = shard.make_group({&head.view, 1}, pool);
    if (d.cpu_layers > 0 || shard.card.embedding) return;
    shard.card.embedding = tied && n_shards == 1 ? shard.head.rows[0].weights : shard.upload_rows(embedding, pool);
  });
  const auto norm = [&](CudaShard& shard, const std::string& name, const float*& weight, const float*& bias) {
    const NormWeights values = binder.norm(name, c);
    weight = shard.upload(values.weight);
    bias = shard.upload(values.bias);
  };
  for (int64_t index = 0; index < c.n_layers; ++index) {
    const auto name = [&](const char* part) { return fmt::format("blk.{}.{}", index, part); };
    if (index < d.cpu_layers) {  // the CPU's decoder has read these
      for (const char* part : {"attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"})
        for (const char* end : {".weight", ".bias"}) binder.ignore(name(part) + end);
      continue;
    }
    d.each([&](CudaShard& shard) {
      Layer& layer = shard.layers.emplace_back();
      norm(shard, name("attn_norm"), layer.attn_norm, layer.attn_norm_bias);
      norm(shard, name("ffn_norm"), layer.ffn_norm, layer.ffn_norm_bias);
      if (c.qk_norm) {
        layer.q_norm = shard.upload(binder.vector(name("attn_q_norm.weight"), c.head_dim));
        layer.k_norm = shard.upload(binder.vector(name("attn_k_norm.weight"), c.head_dim));
      }
      for (size_t input = 0; Group * group : layer.readers()) {
        const auto weights = d.split->cut(layers[size_t(index)], Input(input++), shard.index, pool);
        std::vector<WeightView> parts;
        for (const ShardWeight& weight : weights) parts.push_back(weight.view);
        *group = shard.make_group(parts, pool);
      }
    });
    if (progress) progress->add(1);
  }
  d.each([&](CudaShard& shard) {
    norm(shard, "output_norm", shard.output_norm, shard.output_norm_bias);
    shard.take_workspace(options.deterministic, d.cpu_layers > 0, d.batch_weight_bytes);
  });
  binder.check_all_used();
  d.host_logits.resize(size_t(c.n_vocab));
  d.connect();
  d.dense_token = d.recorded(false);
  return std::unique_ptr<CudaDecoder>(new CudaDecoder(std::move(impl)));
}

const Config& CudaDecoder::config() const { return impl_->config; }
int64_t CudaDecoder::length() const { return impl_->position; }
int64_t CudaDecoder::capacity() const { return impl_->context; }

double CudaDecoder::measure_read_gb_s() {
  double sum = 0;
  for (Card& card : impl_->cards) sum += cuda::measure_read_gb_s(card.device);
  return sum;
}

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
  const Layer& layer = d.lead().layers.front();
  if (d.shards.size() > 1)
    out += fmt::format("{} shards, {}; the first has {} of {} heads and {} of {} feed-forward values:\n",
                       d.shards.size(), d.communicator->describe(), d.lead().config.n_heads, d.config.n_heads,
                       d.lead().config.n_ff, d.config.n_ff);
  add("attn_q, attn_k, attn_v", layer.qkv);
  add("attn_output", layer.o);
  add(d.config.mlp == Mlp::swiglu ? "ffn_gate, ffn_up" : "ffn_up", layer.up);
  add("ffn_down", layer.down);
  return out + fmt::format("output: {}, in rows\n", d.lead().head.rows[0].weights.layout->name);
}

int64_t CudaDecoder::cpu_layers() const { return impl_->cpu_layers; }

int64_t CudaDecoder::weight_bytes() const {
  int64_t bytes = impl_->cpu ? impl_->cpu->weight_bytes() : 0;
  for (const auto& shard : impl_->shards) {
    bytes += shard->head.bytes;
    for (const Layer& layer : shard->layers)
      for (const Group* group : layer.readers()) bytes += group->bytes;
  }
  return bytes;
}

void CudaDecoder::truncate(int64_t length) {
  Impl& d = *impl_;
  if (length < 0 || length > d.position) throw Error("cannot truncate {} tokens to {}", d.position, length);
  d.wait();
  d.position = length;
  d.tell_position();
}

void CudaDecoder::append(std::span<const int32_t> ids) {
  Impl& d = *impl_;
  d.check_room(ids, int64_t(ids.size()));
  d.run_batches(ids, d.masks_batches(), [](int64_t, int64_t) {});
}

void CudaDecoder::Impl::run_ids(std::span<const int32_t> of) {
  check_room(of, int64_t(of.size()));
  if (of.size() == 1) return step(of[0], true);
  const auto count = int64_t(of.size());
  run_batches(of, masks_batches(), [&](int64_t first, int64_t n) {
    if (n > 1 && first + n == count) batch_end(n);
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
  if (d.cards.size() > 1) d.wait();  // an allocation would wait for ever where another device has failed
  const auto at_least = [&](cuda::Buffer& buffer, int64_t bytes, const char* what) {
    if (buffer.bytes() >= bytes) return false;
    buffer = d.lead().take(bytes, what);
    return true;
  };
  const std::span<const int32_t> penalized = sampler.penalized();
  if (!penalized.empty())  // their number grows with every token: few allocations
    at_least(d.penalized, int64_t(std::bit_ceil(penalized.size_bytes())), "penalized tokens");
  at_least(d.candidates, (k + 1) * int64_t(sizeof(cuda::TopKCandidate)), "candidates");
  if (at_least(d.candidates_workspace, cuda::top_k_workspace_bytes(N, k), "choice of candidates"))
    d.candidates_workspace.upload(std::as_bytes(std::span(&cuda::kNoBadValue, 1)));

  d.run_ids(ids);
  if (d.cards.size() > 1) d.wait();  // a copy waits for one device, and for ever where another has failed
  if (!penalized.empty()) d.penalized.upload(std::as_bytes(penalized));
  cuda::TopKArgs args;
  args.x = d.cards.front().logits.as<float>();
  args.N = N;
  args.k = int(k);
  args.penalized = d.penalized.as<int32_t>();
  args.n_penalized = int64_t(penalized.size());
  args.penalty = sampler.repeat_penalty();
  args.out = d.candidates.as<cuda::TopKCandidate>();
  args.workspace = d.candidates_workspace.data();
  d.lead().card.device.use();
  cuda::launch_top_k(d.lead().card.device, d.lead().card.stream, args);
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
  d.run_batches(ids, d.sparsity.has_value(), [&](int64_t first, int64_t n) {
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
    for (const Layer& layer : d.lead().layers)
      for (const Group* group : layer.readers())
        if (!group->only_adds())
          throw Error("--device cuda: thresholds by wina need zigzag or group-sparse weights; take those by magnitude");
  d.wait();
  if (options && options->mask_batches && !d.cpu) d.each([](CudaShard& shard) { shard.reserve_observed(); });
  std::vector<std::deque<cuda::Buffer>> norms(d.shards.size());  // [shards][layers on the device * kInputs]
  if (by_norms)
    d.each([&](CudaShard& shard) {
      for (size_t l = size_t(d.cpu_layers); l < options->thresholds.norms.size(); ++l)
        for (size_t i = 0; i < size_t(kInputs); ++i) {
          const Share share = d.split->inputs(shard.index, Input(i));
          const auto values =
              std::span(options->thresholds.norms[l][i]).subspan(size_t(share.first), size_t(share.count));
          norms[size_t(shard.index)].push_back(shard.take(int64_t(values.size_bytes()), "column norms"));
          norms[size_t(shard.index)].back().upload(std::as_bytes(values));
        }
    });
  d.sparse_token.clear();  // before the norms that it reads go
  for (const auto& shard : d.shards) {
    shard->norms = std::move(norms[size_t(shard->index)]);
    for (size_t l = 0; l < shard->layers.size(); ++l)
      for (size_t i = 0; Group * group : shard->layers[l].readers())
        group->norms = by_norms ? shard->norms[l * kInputs + i++].as<float>() : nullptr;
  }
  if (d.cpu) {
    std::optional<SparsityOptions> first = options;
    if (first) first->mask_batches = false;  // tokens that are masked come one by one
    d.cpu->set_sparsity(std::move(first));
  }
  d.sparsity = std::move(options);
  for (const auto& shard : d.shards)
    for (Layer& layer : shard->layers)
      for (Group* const group : layer.readers())
        for (ZigzagRun& run : group->runs)
          if (d.sparsity) run.sparse = shard->choose_plan(run, d.percent());
  d.record_sparse();
}

std::optional<SparsityOptions> CudaDecoder::sparsity() const {
  const Impl& d = *impl_;
  std::optional<SparsityOptions> out = d.sparsity;
  if (!out) return out;
  for (size_t l = 0; l < size_t(d.cpu_layers); ++l) out->thresholds.t[l] = d.cpu->sparsity()->thresholds.t[l];
  for (int64_t l = 0; l < d.n_layers(); ++l)
    for (size_t i = 0; i < size_t(kInputs); ++i)
      if (!d.skips(l, i)) out->thresholds.t[size_t(d.cpu_layers + l)][i] = 0;
  return out;
}

double CudaDecoder::Impl::time_token(bool sparse) {
  constexpr int kTokens = 6, kRounds = 2;
  std::vector<cuda::Graph> token = recorded(sparse);
  cuda::Stream& stream = cards.front().stream;
  cuda::Stopwatch watch;
  double least = 0;
  for (int round = -1; round < kRounds; ++round) {
    stream.synchronize();
    tell_position();  // the device's moves on with each token
    watch.start(stream);
    for (int i = 0; i < kTokens; ++i) launch(token);
    const double ms = watch.stop_ms(stream) / kTokens;
    if (round == 0 || (round > 0 && ms < least)) least = ms;
  }
  tell_position();
  return least;
}

void CudaDecoder::begin_tuning() {
  Impl& d = *impl_;
  if (d.deterministic) throw Error("plans are tuned in any order of sums; leave out --deterministic");
  if (d.cpu) throw Error("plans are tuned with the whole model on the device; leave out --gpu-layers");
  if (d.shards.size() > 1) throw Error("plans are tuned unsplit; leave out --gpus and --gpu-split");
  if (d.context < kTuneContext)
    throw Error("tuning takes a context of {} tokens, this one holds {}", kTuneContext, d.context);
  truncate(0);
  const int32_t id = 0;
  d.upload_ids({&id, 1});
}

std::vector<CudaGroupsTuning> CudaDecoder::tune_groups(bool progress) {
  begin_tuning();
  Impl& d = *impl_;
  const cuda::DeviceInfo& device = d.lead().card.device.info();
  std::map<cuda::GroupsProduct, std::vector<KeptRun*>> products;
  for (Layer& layer : d.lead().layers)
    for (Group* const group : layer.readers())
      for (KeptRun& run : group->kept) products[run.product()].push_back(&run);
  if (products.empty()) return {};

  std::vector<std::vector<KeptRun*>> runs;
  std::vector<cuda::GroupsPlan> standard;
  std::vector<std::vector<cuda::Candidates<cuda::GroupsPlan>>> stages;
  for (const auto& [product, of] : products) {
    const KeptRun& first = *of.front();
    runs.push_back(of);
    standard.push_back(cuda::default_plan(device, *first.layout, first.groups));
    auto& tried = stages.emplace_back();
    for (const cuda::Split split : {cuda::Split::stream, cuda::Split::slice})
      tried.emplace_back([&, split](cuda::GroupsPlan best) {
        best.split = split;
        return cuda::kernel_candidates(device, *first.layout, first.groups, best);
      });
    tried.emplace_back([](const cuda::GroupsPlan& best) { return cuda::early_candidates(best); });
  }
  std::vector<cuda::GroupsPlan> plans = standard;
  const auto use = [&] {
    for (size_t i = 0; i < runs.size(); ++i)
      for (KeptRun* const run : runs[i]) run->plan = cuda::fitted(run->groups, plans[i]);
  };
  const auto measure = [&](const auto&) {
    use();
    return d.time_token(false);
  };
  {
    SearchBar bar(progress, "Tuning groups", stages);
    cuda::search_plans(plans, stages, measure, bar.options);
  }
  const std::vector<cuda::PlanGain> gains = cuda::measure_gains(plans, standard, measure);
  use();
  std::vector<CudaGroupsTuning> out;
  for (const auto& [product, of] : products) {
    const size_t i = out.size();
    out.push_back({product, plans[i], gains[i].standard_ms, gains[i].found_ms});
    d.plans.set(product, plans[i]);
  }
  d.dense_token = d.recorded(false);
  if (d.sparsity) d.record_sparse();
  return out;
}

std::vector<CudaTuning> CudaDecoder::tune(bool progress) {
  begin_tuning();
  Impl& d = *impl_;
  const cuda::DeviceInfo& device = d.lead().card.device.info();
  const bool sparse = d.sparsity.has_value();
  std::map<cuda::Product, std::vector<ZigzagRun*>> products;
  for (Layer& layer : d.lead().layers)
    for (Group* const group : layer.readers())
      for (ZigzagRun& run : group->runs)
        products[{run.layout->id, run.columns.rows, run.columns.K, d.percent()}].push_back(&run);
  if (products.empty()) return {};

  std::vector<std::vector<ZigzagRun*>> runs;
  std::vector<cuda::GemvPlan> standard, skipping;  // skipping: the best of those that skip
  std::vector<std::vector<cuda::Candidates<cuda::GemvPlan>>> stages;
  for (const auto& [product, of] : products) {
    const ZigzagRun& first = *of.front();
    const size_t i = runs.size();
    runs.push_back(of);
    standard.push_back(cuda::default_plan(device, *first.layout, first.columns,
                                          sparse ? cuda::Inputs::threshold : cuda::Inputs::dense));
    skipping.push_back(standard.back());
    stages.push_back({[&, i](const cuda::GemvPlan& best) {
      if (best.skips) skipping[i] = best;
      return cuda::kernel_candidates(device, *first.layout, first.columns, skipping[i]);
    }});
    if (!sparse) continue;
    // Nothing is early where the best plan is dense.
    stages.back().emplace_back(
        [](const cuda::GemvPlan& best) { return best.skips ? cuda::early_candidates(best) : Zigzags{}; });
    stages.back().emplace_back(
        [](const cuda::GemvPlan& best) { return best.skips ? Zigzags{cuda::without_early_headers(best)} : Zigzags{}; });
    stages.back().emplace_back([&, i](const cuda::GemvPlan& best) {
      if (!best.skips) return Zigzags{};
      skipping[i] = best;
      cuda::GemvPlan dense = first.dense;
      dense.skips = false;
      return Zigzags{dense};
    });
  }
  std::vector<cuda::GemvPlan> plans = standard;
  const auto use = [&] {
    for (size_t i = 0; i < runs.size(); ++i)
      for (ZigzagRun* const run : runs[i]) (sparse ? run->sparse : run->dense) = plans[i];
  };
  const auto measure = [&](const auto&) {
    use();
    return d.time_token(sparse);
  };
  {
    SearchBar bar(progress, sparse ? fmt::format("Tuning {}%", d.percent()) : "Tuning dense", stages);
    cuda::search_plans(plans, stages, measure, bar.options);
  }
  std::vector<cuda::PlanGain> gains = cuda::measure_gains(plans, standard, measure);
  if (sparse) {
    std::vector<cuda::GemvPlan> dense;
    for (const auto& of : runs) {
      dense.push_back(of.front()->dense);
      dense.back().skips = false;
    }
    double ms = 0;
    if (cuda::take_if_faster(plans, dense, measure, ms))
      for (cuda::PlanGain& gain : gains) gain.found_ms = ms;
  }
  use();
  std::vector<CudaTuning> out;
  for (const auto& [product, of] : products) {
    const size_t i = out.size();
    out.push_back({product, plans[i], gains[i].standard_ms, gains[i].found_ms});
    d.plans.set(product, plans[i]);
  }
  if (sparse)
    d.record_sparse();
  else
    d.dense_token = d.recorded(false);
  return out;
}

void CudaDecoder::count_inputs(bool on) {
  Impl& d = *impl_;
  d.wait();
  std::vector<cuda::Buffer> made;
  const int64_t bytes = d.n_layers() * kInputs * int64_t(sizeof(unsigned long long));
  if (on && d.lead().counts.bytes() == 0)
    for (const auto& shard : d.shards) made.push_back(shard->take(bytes, "counts"));
  d.sparse_token.clear();  // before the counts that it writes go
  for (const auto& shard : d.shards)
    if (!on || !made.empty()) shard->counts = on ? std::move(made[size_t(shard->index)]) : cuda::Buffer();
  if (d.cpu) d.cpu->clear_counts();
  d.record_sparse();
}

SparsityCounts CudaDecoder::sparsity_counts() const {
  Impl& d = *impl_;
  SparsityCounts out;
  if (d.lead().counts.bytes() == 0) return out;
  d.wait();
  const auto n_layers = size_t(d.n_layers());
  const auto widths = input_widths(d.config);
  if (d.cpu) out = d.cpu->sparsity_counts();
  out.tokens = d.sparse_tokens;
  const size_t before = out.layers.size();
  out.layers.resize(before + n_layers);
  out.bytes.resize(before + n_layers);
  for (const auto& shard : d.shards) {
    std::vector<std::array<unsigned long long, kInputs>> inactive(n_layers);
    shard->counts.download(std::as_writable_bytes(std::span(inactive)));
    for (size_t l = 0; l < n_layers; ++l)
      for (size_t i = 0; const Group* group : shard->layers[l].readers()) {
        out.layers[before + l][i].inactive += int64_t(inactive[l][i]);
        out.layers[before + l][i].inputs = d.sparse_tokens * widths[i];
        out.bytes[before + l][i++] += group->bytes;
      }
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
      d.wait();
      d.lead().ids.download(std::as_writable_bytes(std::span(&id, 1)));
    }
    return;
  }
  d.wait();
  if (d.moved) d.tell_position();
  d.upload_ids({&id, 1});
  for (int64_t t = 0; t < count; ++t) d.launch(d.next_is_sparse());
}

void CudaDecoder::Impl::check_whole() const {
  if (cpu) throw Error("calibration takes the whole model on the device; leave out --gpu-layers");
  if (shards.size() > 1) throw Error("calibration runs on one device, unsplit; leave out --gpus and --gpu-split");
}

void CudaDecoder::begin_observing() {
  Impl& d = *impl_;
  d.check_whole();
  if (d.observed) return;
  const auto widths = input_widths(d.config);
  Card& card = d.cards.front();
  d.observed.emplace(card.device, card.stream, *std::max_element(widths.begin(), widths.end()));
  d.lead().reserve_observed();
}

void CudaDecoder::run_observed(std::span<const int32_t> ids, const CudaInputsObserver& observer,
                               const Decoder::LogitsSink& sink) {
  Impl& d = *impl_;
  d.check_room(ids, int64_t(ids.size()));
  const Impl::Observing guard{d};
  d.lead().observer = [&](int64_t layer, Input input, float* x, int64_t M, int64_t K) {
    observer(CudaInputs({layer, input, M, K, d.position}, x, *d.observed));
  };
  for (size_t first = 0; first < ids.size();) {
    const auto n = std::min(size_t(d.lead().space.tokens), ids.size() - first);
    d.run_batch(ids.subspan(first, n));
    if (sink)
      d.score_batch(int64_t(n),
                    [&](int64_t at, int64_t count, const float* logits) { sink(int64_t(first) + at, count, logits); });
    first += n;
  }
  d.wait();
}

std::unique_ptr<CudaBlock> CudaDecoder::make_block(int64_t windows, int64_t window, int64_t dense_prefix) {
  Impl& d = *impl_;
  d.check_whole();
  if (window > d.context) throw Error("windows of {} tokens; the context holds {}", window, d.context);
  return std::make_unique<CudaBlock>(d.lead(), windows, window, dense_prefix);
}

std::unique_ptr<BeamEngine> CudaDecoder::make_beams(int64_t beams) {
  if (impl_->cpu) throw Error("beams take the whole model on the device; leave out --gpu-layers, or use --device cpu");
  if (impl_->shards.size() > 1)
    throw Error("beams run on one device, unsplit; leave out --gpus and --gpu-split, or use --device cpu");
  impl_->wait();
  return std::make_unique<CudaBeams>(*this, impl_->lead(), beams);
}

InputBytes CudaDecoder::input_bytes() const {
  InputBytes out;
  for (const auto& shard : impl_->shards) {
    out.resize(shard->layers.size());
    for (size_t l = 0; l < shard->layers.size(); ++l)
      for (size_t i = 0; const Group* group : shard->layers[l].readers()) out[l][i++] += group->bytes;
  }
  return out;
}

CudaShares CudaDecoder::measure_shares() {
  Impl& d = *impl_;
  if (d.position >= d.context) throw Error("no room for a further token: the context holds {}", d.context);
  d.wait();
  Marks marks;
  std::vector<cuda::Graph> token;
  {
    // Not counted: they are none of the sequence's.
    std::vector<cuda::Buffer> counts(d.shards.size());
    const auto swap_counts = [&] {
      for (const auto& shard : d.shards) std::swap(counts[size_t(shard->index)], shard->counts);
    };
    swap_counts();
    d.cards.front().marks = &marks;
    const auto restore = [&] {
      d.cards.front().marks = nullptr;
      swap_counts();
    };
    try {
      token = d.recorded(d.next_is_sparse());
    } catch (...) {
      restore();
      throw;
    }
    restore();
  }
  constexpr int kTokens = 20;
  CudaShares out;
  int32_t id = 0;
  d.lead().ids.download(std::as_writable_bytes(std::span(&id, 1)));
  for (int t = -2; t < kTokens; ++t) {
    d.tell_position();
    d.upload_ids({&id, 1});
    d.run_on_cpu({&id, 1}, false);  // dense, which is not counted; its time is not asked for
    d.moved = true;
    d.launch(token);
    d.wait();
    for (size_t i = 0; t >= 0 && i < marks.kinds.size(); ++i) {
      const double ms = marks.marks[i].ms_to(marks.marks[i + 1]) / kTokens;
      (marks.kinds[i] == Kind::linear      ? out.linear
       : marks.kinds[i] == Kind::attention ? out.attention
       : marks.kinds[i] == Kind::exchange  ? out.exchange
                                           : out.rest) += ms;
    }
  }
  d.tell_position();
  return out;
}

void CudaDecoder::wait() { impl_->wait(); }

}  // namespace lacuna::model
