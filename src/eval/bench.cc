#include "eval/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/rng.h"

namespace lacuna::eval {
namespace {

// Batches and single tokens may round activations differently, and a decoder's layers add these errors up (30 layers of
// SmolLM2-135M: 4.5%). A wrong kernel makes it about 1.
constexpr double kDecoderTolerance = 0.15;
constexpr int64_t kCheckTokens = 16;

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// Throws Error unless the logits of a few tokens, run at once and one by one, are finite and agree.
void check_decoder(model::Decoder& decoder, kernels::KvType kv) {
  const model::Config& config = decoder.config();
  const int64_t tokens = std::min(kCheckTokens, config.n_ctx);
  const std::vector<int32_t> ids = random_ids(tokens, config.n_vocab, 1);
  std::vector<float> batch(size_t(tokens * config.n_vocab));
  model::Session together(decoder, tokens, kv), single(decoder, tokens, kv);
  decoder.forward(together, ids, model::Decoder::Want::all, [&](int64_t first, int64_t count, const float* logits) {
    std::copy_n(logits, count * config.n_vocab, batch.data() + first * config.n_vocab);
  });
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
  }
}

/// Every kind of group, and the head with one token, against the reference; returns the largest relative error.
double check_linear(const io::Checkpoint& checkpoint, ThreadPool& pool, int64_t m, BenchOptions options) {
  options.act_sparsity = 0;
  return std::max(check_groups(model_groups(checkpoint), pool, m, options),
                  check_groups({head_group(checkpoint)}, pool, 1, options));
}

}  // namespace

void set_prefill_rates(BenchRow& row, const std::vector<Group>& groups, int64_t tokens) {
  row.tok_s = double(tokens) * 1e3 / row.median_ms;
  double products = 0;
  for (const Group& group : groups)
    for (const kernels::WeightView& part : group.parts) products += double(part.shape.N) * double(part.shape.K);
  row.tflops = 2e-9 * products * double(tokens) / row.median_ms;
}

std::vector<int32_t> random_ids(int64_t count, int64_t n_vocab, uint64_t seed) {
  Rng rng(seed);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = int32_t(rng.below(uint64_t(n_vocab)));
  return ids;
}

std::vector<BenchRow> bench_linear(const io::Checkpoint& checkpoint, ThreadPool& pool, const BenchOptions& options) {
  std::vector<BenchRow> rows;
  rows.push_back(time_groups(model_groups(checkpoint), pool, 1, options));
  rows.back().bench = "linear";
  rows.back().what = fmt::format("{} layers", model::layer_count(checkpoint));
  const Group head = head_group(checkpoint);
  BenchOptions dense = options;
  dense.act_sparsity = 0;
  rows.push_back(time_groups({head}, pool, 1, dense));
  rows.back().bench = "head";
  rows.back().what = "output head";
  rows.back().n = head.parts[0].shape.N;
  rows.back().k = head.parts[0].shape.K;
  return rows;
}

std::vector<BenchRow> bench_gemm(const io::Checkpoint& checkpoint, ThreadPool& pool, int64_t m,
                                 const BenchOptions& options) {
  std::vector<BenchRow> rows;
  for (const Group& group : model::layer_groups(checkpoint, 0)) {
    rows.push_back(time_groups({group}, pool, m, options));
    rows.back().bench = "gemm";
    rows.back().what = group.name;
    for (const kernels::WeightView& part : group.parts) rows.back().n += part.shape.N;
    rows.back().k = group.parts[0].shape.K;
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
  check_decoder(decoder, kv);
  row.deviation = check_linear(checkpoint, decoder.pool(), 1, options);
  if (sparsity) {
    const BenchOptions sparse{.runs = 1,
                              .prepare = options.prepare,
                              .act_sparsity = sparsity->thresholds.level,
                              .plans = options.plans,
                              .deterministic = options.deterministic};
    check_groups(groups, decoder.pool(), 1, sparse);
    decoder.set_sparsity(sparsity);
  }
  row.checked = true;
  row.bench = "decode";
  row.what = fmt::format("{} tokens at depth {}", tokens, depth);
  row.weight_sparsity = weight_sparsity_of(groups);
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
  check_decoder(decoder, kv);
  row.deviation = check_linear(checkpoint, decoder.pool(), tokens, options);
  row.checked = true;
  row.bench = "prefill";
  row.what = fmt::format("{} tokens", tokens);
  const std::vector<Group> groups = model_groups(checkpoint);
  row.layout = layouts_of(groups);
  row.weight_sparsity = weight_sparsity_of(groups);
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
  set_prefill_rates(row, groups, tokens);
  return row;
}

}  // namespace lacuna::eval
