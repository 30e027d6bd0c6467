// src/eval/cuda_decode.h - decoding and prefill on a CUDA device.
#pragma once

#include <cstdint>
#include <vector>

#include "eval/group_bench.h"
#include "io/checkpoint.h"
#include "model/cuda_decoder.h"
#include "model/decoder.h"

namespace lacuna::eval {

struct CudaDecodeOptions {
  int64_t tokens = 128, depth = 0;
  int runs = 10;
};

/// The largest relative root mean square difference of a few tokens' logits from the CPU's decoder of the same
/// weights, both dense, with the plans that `decoder` uses then. Throws Error when it is too large for the rounding of
/// either.
double check_cuda_decoder(model::CudaDecoder& decoder, model::Decoder& cpu);

/// The same with inputs left out as `options` says; it is no less than that of dense tokens. `decoder` is set to
/// `options` afterwards, and `cpu`, which has no plans, to dense; inputs that the plans of `decoder` run dense are
/// dense in both. Rounding moves inputs over their thresholds, and from layer to layer ever more, until the logits of a
/// deep net are as far from the CPU's as from dense ones. So one input of every fourth layer is thresholded at a time,
/// each of all layers in its turn; where that changes the logits by less than a tenth its thresholds are doubled, up to
/// eightfold. Throws Error where logits differ by more than the largest of: half of what leaving these out changes,
/// three times what dense ones differ by, 0.05; both decoders are then as that part left them.
double check_cuda_sparsity(model::CudaDecoder& decoder, model::Decoder& cpu, const model::SparsityOptions& options);

/// Generation of `tokens` ids one by one after `depth` others, as the decoder is set; the time is that of one token.
/// Two rows: each next token chosen on the device, and each token's logits read by the host. deviation: of
/// check_cuda_decoder() or check_cuda_sparsity(). Throws Error where the context does not hold them.
std::vector<BenchRow> bench_cuda_decode(model::CudaDecoder& decoder, const io::Checkpoint& checkpoint, double deviation,
                                        const CudaDecodeOptions& options);

/// Where the time of single tokens goes, in the middle of those that bench_cuda_decode() times, which has run.
model::CudaShares bench_cuda_shares(model::CudaDecoder& decoder, const CudaDecodeOptions& options);

/// Prefill of a prompt of options.tokens random ids from an empty cache, dense, the last one's logits read by the host;
/// the time is that of all of it. Its logits are checked against those of the same tokens one by one first: throws
/// Error where they differ by more than the rounding of either, and where the context does not hold the tokens.
BenchRow bench_cuda_prefill(model::CudaDecoder& decoder, const io::Checkpoint& checkpoint, double deviation,
                            const CudaDecodeOptions& options);

}  // namespace lacuna::eval
