#include "model/layer_ops.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops.h"
#include "layout/layout.h"

namespace lacuna::model {

std::vector<float> read_vector(const io::Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.shape.K));
  layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, 1, values.data(), tensor.params);
  return values;
}

void apply_norm(const Config& config, ThreadPool& pool, const NormWeights& weights, const float* in, int64_t M,
                float* out) {
  if (config.norm == Norm::rms)
    kernels::rms_norm(pool, in, weights.weight.data(), config.norm_eps, M, config.n_embd, out);
  else
    kernels::layer_norm(pool, in, weights.weight.data(), weights.bias.data(), config.norm_eps, M, config.n_embd, out);
}

void apply_activation(const Config& config, ThreadPool& pool, const float* gate, const float* up, int64_t n,
                      float* out) {
  if (config.mlp == Mlp::swiglu) {
    kernels::swiglu(pool, gate, up, n, out);
    return;
  }
  if (out != up) std::copy_n(up, n, out);
  kernels::relu(pool, out, n);
}

void rotary_row(const Rope& rope, int64_t position, float* cos, float* sin) {
  for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
    const float angle = float(position) * rope.inv_freq[i];  // rounded to float, as in training
    cos[i] = std::cos(angle) * rope.attention_factor;
    sin[i] = std::sin(angle) * rope.attention_factor;
  }
}

}  // namespace lacuna::model
