// src/compress/attention.h - causal attention with gradients that never holds all scores: they are made for a block of
// queries at a time, and again for the gradients.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace lacuna::compress {

/// softmax(q k^T / sqrt(d)) v, each query over the keys up to its own, where window > 0 over the last `window` of them.
/// q: [windows, n_heads, tokens, d]; k, v: [windows, n_kv_heads, tokens, d], query heads h n_heads / n_kv_heads onward
/// share key head h. -> [windows, n_heads, tokens, d]. For gradients q, k and v are kept, nothing else.
/// most_scores: so many scores are held at once, but at least those of one query in all heads. Deterministic.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
                            int64_t most_scores = int64_t{1} << 24);

}  // namespace lacuna::compress
