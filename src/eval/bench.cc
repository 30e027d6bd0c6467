#include "eval/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "core/huge_buffer.h"
#include "core/rng.h"
#include "eval/bandwidth.h"

namespace lacuna::eval {
namespace {

// Inputs may be rounded to 8 bits in blocks of 32 or more: an error of at most 1/254 of the block's largest, spread
// evenly, against values whose root mean square is about a third of it: 3 / 254 / sqrt(3) = 0.7%.
constexpr double kLinearTolerance = 0.02;
// Batches and single tokens may round activations differently, and a decoder's layers add these errors up (30 layers of
// SmolLM2-135M: 4.5%). A wrong kernel makes it about 1.
constexpr double kDecoderTolerance = 0.15;
constexpr int64_t kCheckTokens = 16;
/// Of a tiny model: rotating more copies would take minutes and is not what memory looks like in use anyway.
constexpr int64_t kMaxCopies = 256;

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void set_times(BenchRow& row, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const size_t half = times.size() / 2;
  row.median_ms = times.size() % 2 ? times[half] : 0.5 * (times[half - 1] + times[half]);
  row.min_ms = times.front();
  row.max_ms = times.back();
  row.runs = int(times.size());
}

/// Weights that read one input.
struct Group {
  std::string name;
  std::vector<const io::Tensor*> parts;
};

std::vector<Group> layer_groups(const io::Checkpoint& checkpoint, int64_t layer) {
  static constexpr const char* kGroups[][3] = {{"attn_q", "attn_k", "attn_v"},
                                               {"attn_output", nullptr, nullptr},
                                               {"ffn_gate", "ffn_up", nullptr},
                                               {"ffn_down", nullptr, nullptr}};
  std::vector<Group> groups;
  for (const auto& names : kGroups) {
    Group group;
    for (const char* name : names) {
      const io::Tensor* tensor = name ? checkpoint.find(fmt::format("blk.{}.{}.weight", layer, name)) : nullptr;
      if (!tensor) continue;
      if (!group.name.empty()) group.name += '+';
      group.name += name;
      group.parts.push_back(tensor);
    }
    if (!group.parts.empty()) groups.push_back(std::move(group));
  }
  return groups;
}

Group head_group(const io::Checkpoint& checkpoint) {
  const io::Tensor* head = checkpoint.find("output.weight");
  return {"output", {head ? head : &checkpoint.require("token_embd.weight")}};
}

int64_t layer_count(const io::Checkpoint& checkpoint) {
  return checkpoint.metadata().need_integer(checkpoint.architecture() + ".block_count");
}

int64_t bytes_of(const Group& group) {
  int64_t bytes = 0;
  for (const io::Tensor* part : group.parts) bytes += int64_t(part->bytes.size());
  return bytes;
}

std::string layouts_of(const std::vector<Group>& groups) {
  std::map<std::string_view, int64_t> bytes;
  for (const Group& group : groups)
    for (const io::Tensor* part : group.parts) bytes[part->layout->name] += int64_t(part->bytes.size());
  std::vector<std::pair<int64_t, std::string_view>> order;
  for (const auto& [name, size] : bytes) order.emplace_back(-size, name);
  std::sort(order.begin(), order.end());
  std::string out;
  for (const auto& [size, name] : order) {
    if (!out.empty()) out += '+';
    out += name;
  }
  return out;
}

/// A group ready to run on random inputs, with room for its outputs.
class Runner {
 public:
  /// copy: the group reads its own copy of the bytes, so that two runners never share a cache line of weights.
  Runner(const Group& group, int64_t m, bool copy, ThreadPool& pool, const BenchOptions& options) : m_(m) {
    for (const io::Tensor* part : group.parts) {
      std::span<const std::byte> bytes = part->bytes;
      if (copy) {
        HugeBuffer& own = copies_.emplace_back(bytes.size());
        std::memcpy(own.data(), bytes.data(), bytes.size());
        bytes = own.bytes();
      }
      views_.push_back({part->name, part->layout, part->shape, bytes, {}, part->params});
    }
    linear_ = kernels::make_cpu_linear_group(views_, pool, options.prepare);
    linear_->reserve(m);
    const int64_t K = views_[0].shape.K;
    Rng rng(uint64_t(K) * 7919 + uint64_t(m));
    x_.resize(size_t(m * K));
    for (float& x : x_) x = float(rng.normal());
    sparse_ = options.act_sparsity > 0;
    for (int64_t k = 0; sparse_ && k < K; ++k)
      if (rng.uniform() >= options.act_sparsity) active_.push_back(int32_t(k));
    for (const kernels::WeightView& view : views_) results_.emplace_back(size_t(m * view.shape.N));
    for (size_t i = 0; i < views_.size(); ++i) outputs_.push_back({results_[i].data(), views_[i].shape.N});
  }
  void run() { linear_->run(input(x_.data(), m_), outputs_); }
  /// Bytes that a run reads: zigzag weights are read only where inputs are active.
  int64_t bytes() const {
    int64_t bytes = linear_->weight_bytes();
    for (const kernels::WeightView& view : views_)
      if (sparse_ && view.layout->zigzag)
        bytes -= int64_t(double(view.bytes.size()) * (1 - double(active_.size()) / double(inputs())));
    return bytes;
  }
  double sparsity() const { return sparse_ ? 1 - double(active_.size()) / double(inputs()) : 0; }
  int64_t outputs() const {
    int64_t n = 0;
    for (const kernels::WeightView& view : views_) n += view.shape.N;
    return n;
  }
  int64_t inputs() const { return views_[0].shape.K; }
  /// Compares the first (and the last) row with the reference; returns the relative error, throws when it is too large.
  double check() {
    for (std::vector<float>& result : results_) std::fill(result.begin(), result.end(), NAN);
    run();
    double worst = 0;
    const int64_t K = views_[0].shape.K;
    for (size_t i = 0; i < views_.size(); ++i) {
      const int64_t N = views_[i].shape.N;
      std::vector<float> expected(static_cast<size_t>(N));
      for (const int64_t row : std::set<int64_t>{0, m_ - 1}) {
        kernels::reference_linear(views_[i], input(x_.data() + row * K, 1), {expected.data(), N});
        double error = 0, norm = 0;
        for (int64_t n = 0; n < N; ++n) {
          const double e = expected[size_t(n)], d = results_[i][size_t(row * N + n)] - e;
          error += d * d;
          norm += e * e;
        }
        const double deviation = std::sqrt(error / std::max(norm, 1e-30));
        if (!(deviation <= kLinearTolerance))
          throw Error(
              "{}: the kernel's result is off by {:.3g} of its size (row {} of {}, at most {} allowed); nothing was "
              "timed",
              views_[i].name, deviation, row, m_, kLinearTolerance);
        worst = std::max(worst, deviation);
      }
    }
    return worst;
  }

 private:
  kernels::Activation input(const float* x, int64_t m) const {
    kernels::Activation in{x, m, views_[0].shape.K};
    if (sparse_) {
      in.active = active_.data();
      in.active_count = int64_t(active_.size());
    }
    return in;
  }

  int64_t m_;
  bool sparse_ = false;
  std::vector<int32_t> active_;  // where sparse
  std::vector<HugeBuffer> copies_;
  std::vector<kernels::WeightView> views_;
  std::unique_ptr<kernels::LinearGroup> linear_;
  std::vector<float> x_;
  std::vector<std::vector<float>> results_;
  std::vector<kernels::Output> outputs_;
};

/// Checks one group of each combination of shapes and layouts; returns the largest relative error. runner_of(i) gives
/// the runner of group i.
template <class RunnerOf>
double check_groups(const std::vector<Group>& groups, const RunnerOf& runner_of) {
  std::set<std::vector<std::tuple<const layout::Layout*, int64_t, int64_t>>> seen;
  double worst = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<std::tuple<const layout::Layout*, int64_t, int64_t>> kind;
    for (const io::Tensor* part : groups[i].parts) kind.emplace_back(part->layout, part->shape.N, part->shape.K);
    if (seen.insert(std::move(kind)).second) worst = std::max(worst, runner_of(i).check());
  }
  return worst;
}

/// Times `groups` run one after the other, as one unit, on weights that no cache holds.
BenchRow time_groups(const std::vector<Group>& groups, ThreadPool& pool, int64_t m, const BenchOptions& options) {
  int64_t bytes = 0;
  for (const Group& group : groups) bytes += bytes_of(group);
  const int64_t cold = 4 * last_level_cache_bytes();
  const int64_t copies = std::clamp<int64_t>((cold + bytes - 1) / std::max<int64_t>(1, bytes), 1, kMaxCopies);
  std::vector<std::vector<Runner>> rotation;
  for (int64_t c = 0; c < copies; ++c) {
    std::vector<Runner>& runners = rotation.emplace_back();
    for (const Group& group : groups) runners.emplace_back(group, m, copies > 1, pool, options);
  }
  BenchRow row;
  row.deviation = check_groups(groups, [&](size_t i) -> Runner& { return rotation[0][i]; });
  row.checked = true;
  row.layout = layouts_of(groups);
  row.m = m;
  double inputs = 0, inactive = 0;
  for (const Runner& runner : rotation[0]) {
    row.bytes += runner.bytes();
    const double weights = double(runner.outputs()) * double(runner.inputs());
    inputs += weights;
    inactive += weights * runner.sparsity();
  }
  row.act_sparsity = inactive / std::max(1.0, inputs);

  std::vector<double> times;
  int64_t next = 0;
  for (int run = -1; run < options.runs; ++run) {  // the first one warms the threads up
    std::vector<Runner>& runners = rotation[size_t(next++ % copies)];
    const auto start = Clock::now();
    for (Runner& runner : runners) runner.run();
    if (run >= 0) times.push_back(ms_since(start));
  }
  set_times(row, std::move(times));
  row.tok_s = double(m) * 1e3 / row.median_ms;
  if (m > 1) {
    double products = 0;
    for (const Runner& runner : rotation[0]) products += double(runner.outputs()) * double(runner.inputs());
    row.tflops = 2e-9 * products * double(m) / row.median_ms;
  }
  return row;
}

std::vector<int32_t> random_ids(int64_t count, int64_t n_vocab, uint64_t seed) {
  Rng rng(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = int32_t(rng.below(uint64_t(n_vocab)));
  return ids;
}

/// Logits of a few tokens, run at once and one by one, are finite and agree; returns the largest relative error.
double check_decoder(model::Decoder& decoder, kernels::KvType kv) {
  const model::Config& config = decoder.config();
  const int64_t tokens = std::min(kCheckTokens, config.n_ctx);
  const std::vector<int32_t> ids = random_ids(tokens, config.n_vocab, 1);
  std::vector<float> batch(size_t(tokens * config.n_vocab));
  model::Session together(decoder, tokens, kv), single(decoder, tokens, kv);
  decoder.forward(together, ids, model::Decoder::Want::all, [&](int64_t first, int64_t count, const float* logits) {
    std::copy_n(logits, count * config.n_vocab, batch.data() + first * config.n_vocab);
  });
  double worst = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const std::span<const float> logits = decoder.forward(single, std::span(ids).subspan(size_t(t), 1));
    double error = 0, norm = 0;
    for (int64_t v = 0; v < config.n_vocab; ++v) {
      const double e = batch[size_t(t * config.n_vocab + v)], d = logits[size_t(v)] - e;
      error += d * d;
      norm += e * e;
    }
    const double deviation = std::sqrt(error / std::max(norm, 1e-30));
    if (!(deviation <= kDecoderTolerance))
      throw Error(
          "token {}: logits of a batch and of single tokens differ by {:.3g} of their size (at most {} allowed); "
          "nothing was timed",
          t, deviation, kDecoderTolerance);
    worst = std::max(worst, deviation);
  }
  return worst;
}

std::vector<Group> model_groups(const io::Checkpoint& checkpoint) {
  std::vector<Group> groups;
  for (int64_t i = 0; i < layer_count(checkpoint); ++i)
    for (Group& group : layer_groups(checkpoint, i)) groups.push_back(std::move(group));
  if (groups.empty()) throw Error("{}: the model has no linear layers to time", checkpoint.path());
  return groups;
}

}  // namespace

std::vector<BenchRow> bench_linear(const io::Checkpoint& checkpoint, ThreadPool& pool, const BenchOptions& options) {
  std::vector<BenchRow> rows;
  rows.push_back(time_groups(model_groups(checkpoint), pool, 1, options));
  rows.back().bench = "linear";
  rows.back().what = fmt::format("{} layers", layer_count(checkpoint));
  const Group head = head_group(checkpoint);
  BenchOptions dense = options;
  dense.act_sparsity = 0;
  rows.push_back(time_groups({head}, pool, 1, dense));
  rows.back().bench = "head";
  rows.back().what = "output head";
  rows.back().n = head.parts[0]->shape.N;
  rows.back().k = head.parts[0]->shape.K;
  return rows;
}

std::vector<BenchRow> bench_gemm(const io::Checkpoint& checkpoint, ThreadPool& pool, int64_t m,
                                 const BenchOptions& options) {
  std::vector<BenchRow> rows;
  for (const Group& group : layer_groups(checkpoint, 0)) {
    rows.push_back(time_groups({group}, pool, m, options));
    rows.back().bench = "gemm";
    rows.back().what = group.name;
    for (const io::Tensor* part : group.parts) rows.back().n += part->shape.N;
    rows.back().k = group.parts[0]->shape.K;
  }
  return rows;
}

BenchRow bench_decode(model::Decoder& decoder, const io::Checkpoint& checkpoint, int64_t tokens, int64_t depth,
                      kernels::KvType kv, const BenchOptions& options) {
  const model::Config& config = decoder.config();
  if (depth + tokens > config.n_ctx)
    throw Error("--context {} and --gen {} need {} positions, but the model allows {}", depth, tokens, depth + tokens,
                config.n_ctx);
  BenchRow row;
  std::vector<Group> groups = model_groups(checkpoint);
  // An input near its threshold may fall on either side of it, so batches and single tokens of a sparse decoder need
  // not agree: the dense decoder and the layers with inputs left out are checked apart.
  const std::optional<model::SparsityOptions> sparsity = decoder.sparsity();
  decoder.set_sparsity(std::nullopt);
  row.deviation = check_decoder(decoder, kv);
  if (sparsity) {
    const BenchOptions sparse{.runs = 1, .prepare = options.prepare, .act_sparsity = sparsity->thresholds.level};
    check_groups(groups, [&](size_t i) { return Runner(groups[i], 1, false, decoder.pool(), sparse); });
    decoder.set_sparsity(sparsity);
  }
  row.checked = true;
  row.bench = "decode";
  row.what = fmt::format("{} tokens at depth {}", tokens, depth);
  groups.push_back(head_group(checkpoint));
  row.layout = layouts_of(groups);
  row.bytes = decoder.weight_bytes();

  model::Session session(decoder, depth + tokens, kv);
  if (depth > 0) decoder.forward(session, random_ids(depth, config.n_vocab, 2), model::Decoder::Want::none, {});
  std::vector<int32_t> ids = random_ids(tokens, config.n_vocab, 3);
  if (sparsity) {
    for (int64_t t = 0; t + 1 < tokens; ++t) {
      const std::span<const float> logits = decoder.forward(session, std::span(ids).subspan(size_t(t), 1));
      ids[size_t(t + 1)] = int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
    }
  }
  std::vector<double> times;
  for (int run = -1; run < options.runs; ++run) {
    session.truncate(depth);
    const int64_t count = run < 0 ? std::min<int64_t>(tokens, 8) : tokens;  // a short warm-up
    const auto start = Clock::now();
    for (int64_t t = 0; t < count; ++t) decoder.forward(session, std::span(ids).subspan(size_t(t), 1));
    if (run >= 0) times.push_back(ms_since(start) / double(count));
  }
  set_times(row, std::move(times));
  row.tok_s = 1e3 / row.median_ms;
  if (sparsity) {
    // Of the timed tokens: those of the dense prefix leave nothing out.
    const int64_t sparse = std::clamp<int64_t>(depth + tokens - sparsity->dense_prefix, 0, tokens);
    row.act_sparsity = decoder.sparsity_counts().share() * double(sparse) / double(tokens);
    double layers = 0;
    for (const auto& layer : decoder.sparsity_counts().bytes)
      for (const int64_t part : layer) layers += double(part);
    row.bytes -= int64_t(row.act_sparsity * layers);
  }
  return row;
}

BenchRow bench_prefill(model::Decoder& decoder, const io::Checkpoint& checkpoint, int64_t tokens, kernels::KvType kv,
                       const BenchOptions& options) {
  const model::Config& config = decoder.config();
  if (tokens > config.n_ctx)
    throw Error("--prompt {} is more than the {} positions that the model allows", tokens, config.n_ctx);
  BenchRow row;
  row.deviation = check_decoder(decoder, kv);
  row.checked = true;
  row.bench = "prefill";
  row.what = fmt::format("{} tokens", tokens);
  const std::vector<Group> groups = model_groups(checkpoint);
  row.layout = layouts_of(groups);
  row.bytes = decoder.weight_bytes();
  row.m = tokens;

  model::Session session(decoder, tokens, kv);
  const std::vector<int32_t> ids = random_ids(tokens, config.n_vocab, 4);
  std::vector<double> times;
  for (int run = -1; run < options.runs; ++run) {
    session.truncate(0);
    const auto start = Clock::now();
    decoder.forward(session, ids);
    if (run >= 0) times.push_back(ms_since(start));
  }
  set_times(row, std::move(times));
  row.tok_s = double(tokens) * 1e3 / row.median_ms;
  double products = 0;
  for (const Group& group : groups)
    for (const io::Tensor* part : group.parts) products += double(part->shape.N) * double(part->shape.K);
  row.tflops = 2e-9 * products * double(tokens) / row.median_ms;
  return row;
}

}  // namespace lacuna::eval
