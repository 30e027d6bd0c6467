// src/eval/bench.h - timings of a model and of its linear layers; every result is checked before the clock starts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "io/checkpoint.h"
#include "kernels/linear.h"
#include "kernels/ops.h"
#include "model/decoder.h"

namespace lacuna::eval {

struct BenchRow {
  std::string bench;   // "linear", "head", "gemm", "decode", "prefill"
  std::string what;    // "32 layers", "attn_q+attn_k+attn_v", "128 tokens at depth 0"
  std::string layout;  // layouts of the weights read, most bytes first: "q4_K+q6_K"
  double median_ms = 0, min_ms = 0, max_ms = 0;
  int runs = 0;
  int64_t bytes = 0;  // of weights, read in one timed unit (one token, one batch)
  double tok_s = 0;
  bool checked = false;
  double deviation = 0;          // found by the check: root mean square error over root mean square of the reference
  int64_t m = 1, n = 0, k = 0;   // rows of a product; n, k 0: several shapes
  double act_sparsity = 0;       // realised, by weight bytes
  std::optional<double> tflops;  // dense-equivalent, for M > 1

  double gb_s() const { return median_ms > 0 ? double(bytes) / median_ms / 1e6 : 0; }
};

struct BenchOptions {
  int runs = 10;
  kernels::Prepare prepare = kernels::Prepare::automatic;
  /// Linear layers alone: share of the inputs, random ones, that do not count. The head is dense.
  double act_sparsity = 0;
};

/// Every linear layer of one token in the order of the model (q+k+v, o, gate+up, down), then the head alone. Weights
/// are cold: a model smaller than four times the last-level cache is copied and the copies are rotated. One group of
/// each shape and layout is compared with reference_linear first; Error when one is off.
std::vector<BenchRow> bench_linear(const io::Checkpoint& checkpoint, ThreadPool& pool, const BenchOptions& options);

/// The same groups of the first layer for m rows, one row of results a group.
std::vector<BenchRow> bench_gemm(const io::Checkpoint& checkpoint, ThreadPool& pool, int64_t m,
                                 const BenchOptions& options);

/// Generation of `tokens` ids one by one after `depth` others; the time is that of one token. They are random, unless
/// the decoder is sparse: then they are what the model itself says after a random first one, so that the active inputs
/// are those of text.
BenchRow bench_decode(model::Decoder& decoder, const io::Checkpoint& checkpoint, int64_t tokens, int64_t depth,
                      kernels::KvType kv, const BenchOptions& options);

/// One batch of `tokens` random ids from an empty cache.
BenchRow bench_prefill(model::Decoder& decoder, const io::Checkpoint& checkpoint, int64_t tokens, kernels::KvType kv,
                       const BenchOptions& options);

}  // namespace lacuna::eval
