#include "kernels/e4m3_tokens.h"

#include <cmath>

namespace lacuna::kernels {

namespace {

float token_scale(const float* x, int64_t K) {
  float most = 0;
  for (int64_t k = 0; k < K; ++k) most = std::abs(x[k]) > most ? std::abs(x[k]) : most;
  return e4m3_scale(most);
}

}  // namespace

void quantize_per_token(const float* x, int64_t stride, int64_t M, int64_t K, e4m3* codes, float* scale) {
  for (int64_t m = 0; m < M; ++m) {
    const float* row = x + m * stride;
    scale[m] = token_scale(row, K);
    const float inverse = 1 / scale[m];
    for (int64_t k = 0; k < K; ++k) codes[m * K + k] = to_e4m3(row[k] * inverse);
  }
}

void project_per_token(const float* x, int64_t stride, int64_t M, int64_t K, float* out) {
  for (int64_t m = 0; m < M; ++m) {
    const float* row = x + m * stride;
    const float scale = token_scale(row, K), inverse = 1 / scale;
    for (int64_t k = 0; k < K; ++k) out[m * K + k] = scale * to_float(to_e4m3(row[k] * inverse));
  }
}

}  // namespace lacuna::kernels
