// src/eval/bench.h - timings of a model and of its linear layers; every result is checked before the clock starts.
#pragma once

#include <cstdint>
#include <vector>

#include "core/thread_pool.h"
#include "eval/group_bench.h"
#include "io/checkpoint.h"
#include "kernels/ops.h"
#include "model/decoder.h"

namespace lacuna::eval {

/// Tokens that a benchmark runs: the same for the same seed.
std::vector<int32_t> random_ids(int64_t count, int64_t n_vocab, uint64_t seed);

/// Tokens and dense-equivalent TFLOP/s of a prompt, from the row's median time. groups: the weights that it multiplies.
void set_prefill_rates(BenchRow& row, const std::vector<Group>& groups, int64_t tokens);

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
