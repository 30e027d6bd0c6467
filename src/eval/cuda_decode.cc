#include "eval/cuda_decode.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>

#include "core/error.h"
#include "eval/bench.h"

namespace lacuna::eval {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kCheckTokens = 4, kSparseCheckTokens = 2, kSparseCheckLayers = 4;
/// A product on the device is off by 1.2e-3 of its size, on the CPU by about 6e-3 (8-bit inputs); layers add to that.
constexpr double kLargestDeviation = 0.1;
/// What a few inputs that rounding moves over their thresholds may change where leaving inputs out changes little.
constexpr double kFewInputs = 0.05;
/// Thresholds are raised so much at most to see what leaving inputs out changes.
constexpr float kMostRaised = 8;

/// Relative root mean square difference.
double difference(std::span<const float> expected, std::span<const float> found) {
  double error = 0, norm = 0;
  for (size_t v = 0; v < expected.size(); ++v) {
    const double e = expected[v], d = found[v] - e;
    error += d * d;
    norm += e * e;
  }
  return std::sqrt(error / std::max(norm, 1e-30));
}

/// difference(). Throws Error when it is too large for the rounding of either.
double check_logits(std::span<const float> expected, std::span<const float> found, const char* of) {
  const double deviation = difference(expected, found);
  if (!(deviation < kLargestDeviation))
    throw Error("the logits of the device differ from {} by {:.3g} of their size; expected less than {}", of, deviation,
                kLargestDeviation);
  return deviation;
}

}  // namespace

double check_cuda_decoder(model::CudaDecoder& decoder, model::Decoder& cpu) {
  const int64_t tokens = std::min(kCheckTokens, decoder.capacity());
  model::Session session(cpu, tokens);
  decoder.truncate(0);
  double worst = 0;
  for (const int32_t id : random_ids(tokens, decoder.config().n_vocab, 1)) {
    const std::span<const float> expected = cpu.forward(session, {&id, 1}), found = decoder.forward({&id, 1});
    worst = std::max(worst, check_logits(expected, found, "the CPU's"));
  }
  decoder.truncate(0);
  return worst;
}

double check_cuda_sparsity(model::CudaDecoder& decoder, model::Decoder& cpu, const model::SparsityOptions& options) {
  const std::vector<int32_t> ids =
      random_ids(std::min(kSparseCheckTokens, decoder.capacity()), decoder.config().n_vocab, 1);
  const auto logits = [&](const auto& forward) {
    std::vector<float> all;
    for (const int32_t id : ids) {
      const std::span<const float> some = forward(id);
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  };
  const auto on_cpu = [&](const std::optional<model::SparsityOptions>& sparsity) {
    cpu.set_sparsity(sparsity);
    model::Session session(cpu, int64_t(ids.size()));
    return logits([&](const int32_t id) { return cpu.forward(session, {&id, 1}); });
  };
  const auto on_device = [&](const std::optional<model::SparsityOptions>& sparsity) {
    decoder.set_sparsity(sparsity);
    decoder.truncate(0);
    return logits([&](const int32_t id) { return decoder.forward({&id, 1}); });
  };

  decoder.set_sparsity(options);
  const model::PerInput t = decoder.sparsity()->thresholds.t;  // 0 where its plans run an input dense
  const std::vector<float> dense = on_cpu(std::nullopt);
  const double rounding = check_logits(dense, on_device(std::nullopt), "the CPU's");
  double worst = rounding;
  for (int64_t part = 0; part < kSparseCheckLayers * model::kInputs; ++part) {
    const auto input = size_t(part % model::kInputs);
    const int64_t first = part / model::kInputs;
    model::SparsityOptions some = options;
    some.dense_prefix = 0;
    some.thresholds.t.assign(t.size(), {});
    bool any = false;
    for (size_t l = size_t(first); l < t.size(); l += size_t(kSparseCheckLayers)) {
      some.thresholds.t[l][input] = t[l][input];
      any = any || t[l][input] > 0;
    }
    if (!any) continue;
    std::vector<float> expected = on_cpu(some);
    for (float raised = 1; raised < kMostRaised && difference(dense, expected) < 2 * kFewInputs; raised *= 2) {
      for (auto& of_layer : some.thresholds.t) of_layer[input] *= 2;
      expected = on_cpu(some);
    }
    const double off = difference(expected, on_device(some));
    const double limit = std::max({3 * rounding, difference(dense, expected) / 2, kFewInputs});
    if (!(off < limit))
      throw Error(
          "with inputs left out of {} in every fourth layer from {} on, the logits of the device differ from the CPU's "
          "by {:.3g} of their size; expected less than {:.3g}",
          model::name_of(model::Input(input)), first, off, limit);
    worst = std::max(worst, off);
  }
  cpu.set_sparsity(std::nullopt);
  decoder.set_sparsity(options);
  decoder.truncate(0);
  return worst;
}

std::vector<BenchRow> bench_cuda_decode(model::CudaDecoder& decoder, const io::Checkpoint& checkpoint, double deviation,
                                        const CudaDecodeOptions& options) {
  const int64_t tokens = options.tokens, depth = options.depth;
  const int64_t n_vocab = decoder.config().n_vocab;
  if (depth + tokens > decoder.capacity())
    throw Error("--context {} and --gen {} need {} positions, but the decoder has {}", depth, tokens, depth + tokens,
                decoder.capacity());
  std::vector<Group> groups = model_groups(checkpoint);
  groups.push_back(head_group(checkpoint));
  BenchRow row;
  row.bench = "decode";
  row.layout = layouts_of(groups);
  row.bytes = decoder.weight_bytes();
  row.checked = true;
  row.deviation = deviation;

  const int32_t first = random_ids(1, n_vocab, 3)[0];
  decoder.truncate(0);
  decoder.append(random_ids(depth, n_vocab, 2));
  // Once with counts, which the timed runs do not keep. It also finds the tokens.
  decoder.count_inputs(true);
  std::vector<int32_t> ids = {first};
  for (int64_t t = 0; t < tokens; ++t) {
    const std::span<const float> logits = decoder.forward({&ids.back(), 1});
    ids.push_back(int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  const model::SparsityCounts counts = decoder.sparsity_counts();
  decoder.count_inputs(false);
  if (counts.tokens > 0) {
    // Of the timed tokens: those of the dense prefix leave nothing out.
    row.act_sparsity = counts.share() * double(counts.tokens) / double(tokens);
    double skippable = 0;  // weights in other layouts are read whole
    for (const Group& group : model_groups(checkpoint))
      for (const kernels::WeightView& part : group.parts)
        if (part.layout->zigzag) skippable += double(part.layout->size_bytes(part.shape, part.params));
    row.bytes -= int64_t(row.act_sparsity * skippable);
  }

  std::vector<BenchRow> rows;
  const auto time = [&](const std::string& what, const auto& run) {
    std::vector<double> times;
    for (int i = -2; i < options.runs; ++i) {
      decoder.truncate(depth);
      decoder.wait();
      const auto start = Clock::now();
      run();
      decoder.wait();
      if (i >= 0)
        times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count() / double(tokens));
    }
    row.what = what;
    set_times(row, std::move(times));
    row.tok_s = 1e3 / row.median_ms;
    rows.push_back(row);
  };
  time(fmt::format("{} tokens at depth {}", tokens, depth), [&] { decoder.follow(first, tokens); });
  time(fmt::format("{} tokens at depth {}, logits on the host", tokens, depth), [&] {
    for (int64_t t = 0; t < tokens; ++t) decoder.forward({&ids[size_t(t)], 1});
  });
  return rows;
}

model::CudaShares bench_cuda_shares(model::CudaDecoder& decoder, const CudaDecodeOptions& options) {
  decoder.truncate(options.depth + options.tokens / 2);
  return decoder.measure_shares();
}

BenchRow bench_cuda_prefill(model::CudaDecoder& decoder, const io::Checkpoint& checkpoint, double deviation,
                            const CudaDecodeOptions& options) {
  const int64_t tokens = options.tokens, n_vocab = decoder.config().n_vocab;
  if (tokens > decoder.capacity())
    throw Error("--prompt {} is more than the {} positions that the decoder has", tokens, decoder.capacity());
  const std::vector<Group> groups = model_groups(checkpoint);
  BenchRow row;
  row.bench = "prefill";
  row.what = fmt::format("{} tokens", tokens);
  row.layout = layouts_of(groups);
  row.bytes = decoder.weight_bytes();
  row.m = tokens;

  const std::vector<int32_t> ids = random_ids(tokens, n_vocab, 4);
  decoder.truncate(0);
  std::vector<float> expected;
  for (const int32_t id : ids) {
    const std::span<const float> logits = decoder.forward({&id, 1});
    if (&id == &ids.back()) expected.assign(logits.begin(), logits.end());
  }
  decoder.truncate(0);
  row.deviation = std::max(deviation, check_logits(expected, decoder.forward(ids), "those of its tokens one by one"));
  row.checked = true;

  std::vector<double> times;
  for (int i = -2; i < options.runs; ++i) {
    decoder.truncate(0);
    const auto start = Clock::now();
    decoder.forward(ids);
    if (i >= 0) times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  decoder.truncate(0);
  set_times(row, std::move(times));
  set_prefill_rates(row, groups, tokens);
  return row;
}

}  // namespace lacuna::eval
