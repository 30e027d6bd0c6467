// src/kernels/e4m3_tokens.h - dynamic per-token quantization of activations to FP8 (QuaSpa, section 3.2), what every
// reader of an E4M3 weight multiplies with: y[m,n] = x_scale[m] * w_scale[n] * sum_k x_code[m,k] * w_code[n,k].
//
// Linear groups (kernels/linear.h) quantize their input so themselves for parts in the layouts f8 and nm24_f8; parts in
// f32, f16, bf16 and nm24_bf16 read the same input as it is.
#pragma once

#include <cstdint>

#include "core/e4m3.h"

namespace lacuna::kernels {

/// Codes and scale of each token: scale = e4m3_scale(max_k |x|), code = to_e4m3(x * (1 / scale)), each operation
/// rounded to float32 as written, so that every backend returns the same bytes. A NaN in a token has the code NaN; a
/// token with an infinity has an infinite scale and NaN in the infinity's place: its outputs are NaN, other tokens' are
/// not touched. x: [M, K], rows `stride` floats apart; codes: [M, K]; scale: [M].
void quantize_per_token(const float* x, int64_t stride, int64_t M, int64_t K, e4m3* codes, float* scale);

/// What the codes stand for: scale * code, rounded to float32. x, out: [M, K], rows `stride` and K floats apart.
void project_per_token(const float* x, int64_t stride, int64_t M, int64_t K, float* out);

}  // namespace lacuna::kernels
