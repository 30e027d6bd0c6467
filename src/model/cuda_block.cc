#include "model/cuda_block.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/calibration.h"
#include "model/cuda_shard.h"

namespace lacuna::model {

CudaBlock::CudaBlock(CudaShard& shard, int64_t windows, int64_t window, int64_t dense_prefix)
    : shard_(shard), windows_(windows), window_(window), dense_prefix_(dense_prefix) {
  const Config& c = shard_.config;
  const Layer& layer = shard_.layers.front();  // all are of one shape
  const int64_t T = windows_ * window_, q = c.n_heads * c.head_dim;
  const auto widths = input_widths(c);
  const int64_t widest = *std::max_element(widths.begin(), widths.end());
  std::vector<std::pair<float**, int64_t>> parts = {{&x_, T * c.n_embd},
                                                    {&attn_in_, T * c.n_embd},
                                                    {&dense_out_, T * c.n_embd},
                                                    {&rotated_, T * layer.qkv.outputs},
                                                    {&masked_, std::min(T, shard_.space.tokens) * widest}};
  for (Pass* pass : {&kept_, &trial_}) {
    parts.insert(parts.end(), {{&pass->qkv, T * layer.qkv.outputs},
                               {&pass->attended, T * q},
                               {&pass->residual, T * c.n_embd},
                               {&pass->ffn_in, T * c.n_embd},
                               {&pass->up, T * layer.up.outputs},
                               {&pass->ffn_down, T * c.n_ff},
                               {&pass->out, T * c.n_embd}});
  }
  int64_t floats = 0;
  for (const auto& [pointer, count] : parts) floats += padded(count);
  space_ = shard_.take(floats * int64_t(sizeof(float)), "the search's results of a layer");
  space_.fill(0);
  auto* next = space_.as<float>();
  for (const auto& [pointer, count] : parts) *pointer = std::exchange(next, next + padded(count));
  norms_ = shard_.take(widest * int64_t(sizeof(float)), "column norms");
  parts_ = shard_.take(cuda::kDistanceParts * int64_t(sizeof(double)), "sums");
}

void CudaBlock::begin(std::span<const int32_t> ids) {
  const int64_t T = windows_ * window_, width = shard_.config.n_embd;
  if (int64_t(ids.size()) != T) throw Error("{} tokens for {} windows of {}", ids.size(), windows_, window_);
  shard_.card.device.use();
  layer_ = -1;
  const int32_t position = 0;
  shard_.card.stream.synchronize();
  shard_.positions.upload(std::as_bytes(std::span(&position, 1)));
  for (int64_t first = 0; first < T; first += shard_.space.tokens) {
    const int64_t M = std::min(shard_.space.tokens, T - first);
    shard_.ids.upload(std::as_bytes(ids.subspan(size_t(first), size_t(M))));
    shard_.record_embedding(M, x_ + first * width);
    shard_.card.stream.synchronize();  // before the next ids are in their place
  }
}

void CudaBlock::next() {
  shard_.card.device.use();
  if (layer_ >= 0) copy(dense_out_, shard_.config.n_embd, x_);
  ++layer_;
  const Layer& layer = shard_.layers.at(size_t(layer_));
  norm(layer.attn_norm, layer.attn_norm_bias, x_, attn_in_);
  restart();
  copy(kept_.out, shard_.config.n_embd, dense_out_);
  scale_ = std::max(distance(dense_out_, x_), std::numeric_limits<double>::min());
}

const Group& CudaBlock::group_of(Matrix matrix) const {
  return *shard_.layers.at(size_t(std::max<int64_t>(0, layer_))).readers()[size_t(input_of(matrix))];
}

size_t CudaBlock::part_of(Matrix matrix) const {
  switch (matrix) {
    case Matrix::k:
      return 1;
    case Matrix::v:
      return 2;
    case Matrix::up:
      return has(Matrix::gate) ? 1 : 0;
    default:
      return 0;
  }
}

int64_t CudaBlock::outputs_of(Matrix matrix) const {
  const Config& c = shard_.config;
  switch (matrix) {
    case Matrix::q:
      return c.n_heads * c.head_dim;
    case Matrix::k:
    case Matrix::v:
      return c.n_kv_heads * c.head_dim;
    case Matrix::gate:
    case Matrix::up:
      return c.n_ff;
    default:
      return c.n_embd;
  }
}

bool CudaBlock::has(Matrix matrix) const { return matrix != Matrix::gate || shard_.config.mlp == Mlp::swiglu; }

int64_t CudaBlock::weight_bytes(Matrix matrix) const {
  return has(matrix) ? group_of(matrix).part_bytes[part_of(matrix)] : 0;
}

void CudaBlock::copy(const float* from, int64_t width, float* to) {
  cuda::launch_mask_rows(shard_.card.device, shard_.card.stream,
                         {.x = from, .M = windows_ * window_, .K = width, .y = to});
}

void CudaBlock::norm(const float* weight, const float* bias, float* x, float* y) {
  const Config& c = shard_.config;
  for (int64_t first = 0; first < windows_ * window_; first += shard_.space.tokens)
    shard_.write_inputs(
        {.x = x + first * c.n_embd, .stride = c.n_embd, .norm = weight, .norm_bias = bias, .eps = c.norm_eps, .to = {}},
        std::min(shard_.space.tokens, windows_ * window_ - first), c.n_embd, y + first * c.n_embd);
}

void CudaBlock::linear(Matrix matrix, const float* in, const Block::Mask& mask, bool add, float* y, int64_t stride) {
  const Group& group = group_of(matrix);
  const int64_t T = windows_ * window_, K = group.K();
  if (mask.t > 0 && mask.norms != nullptr) {
    shard_.card.stream.synchronize();  // the norms before are not read any more
    norms_.upload(std::as_bytes(std::span(mask.norms, size_t(K))));
  }
  for (int64_t first = 0; first < T; first += shard_.space.tokens) {
    const int64_t M = std::min(shard_.space.tokens, T - first);
    const float* x = in + first * K;
    if (mask.t > 0) {
      cuda::MaskRowsArgs args;
      args.x = x;
      args.M = M;
      args.K = K;
      args.t = mask.t;
      args.norms = mask.norms != nullptr ? norms_.as<float>() : nullptr;
      args.first = first;
      args.window = window_;
      args.dense = dense_prefix_;
      args.y = masked_;
      cuda::launch_mask_rows(shard_.card.device, shard_.card.stream, args);
      x = masked_;
    }
    const cuda::Operand inputs = shard_.make_inputs(group, {.x = x, .stride = K, .to = {}}, M);
    shard_.multiply(group, inputs, {group.at[part_of(matrix)], outputs_of(matrix)}, add, y + first * stride, stride);
  }
}

void CudaBlock::attend(const Pass& pass) {
  const Config& c = shard_.config;
  const Layer& layer = shard_.layers[size_t(layer_)];
  copy(pass.qkv, layer.qkv.outputs, rotated_);
  for (int64_t w = 0; w < windows_; ++w) {
    cuda::BatchAttentionArgs attention;
    attention.heads = shard_.heads_of(layer, layer_, rotated_ + w * window_ * layer.qkv.outputs);
    attention.heads.M = window_;
    attention.window = c.window;
    attention.scale = 1 / std::sqrt(float(c.head_dim));
    attention.out_stride = c.n_heads * c.head_dim;
    attention.out = pass.attended + w * window_ * attention.out_stride;
    cuda::launch_heads(shard_.card.device, shard_.card.stream, attention.heads);
    cuda::launch_batch_attention(shard_.card.device, shard_.card.stream, attention);
  }
}

void CudaBlock::rerun(std::span<const Matrix> changed, const Block::Masks& masks, const Pass& from, Pass& pass) {
  const auto is = [&](Matrix m) { return std::ranges::find(changed, m) != changed.end(); };
  const auto mask = [&](Matrix m) -> const Block::Mask& { return masks[size_t(m)]; };
  const Layer& layer = shard_.layers[size_t(layer_)];
  const int64_t width = shard_.config.n_embd;
  const bool attention = is(Matrix::q) || is(Matrix::k) || is(Matrix::v), output = attention || is(Matrix::o);
  const bool gate = has(Matrix::gate) && (output || is(Matrix::gate)), up = output || is(Matrix::up);
  if (attention) {
    if (&from != &pass) copy(from.qkv, layer.qkv.outputs, pass.qkv);
    for (const Matrix m : {Matrix::q, Matrix::k, Matrix::v})
      if (is(m)) linear(m, attn_in_, mask(m), false, pass.qkv + layer.qkv.at[part_of(m)], layer.qkv.outputs);
    attend(pass);
  }
  if (output) {
    copy(x_, width, pass.residual);
    linear(Matrix::o, attention ? pass.attended : from.attended, mask(Matrix::o), true, pass.residual, width);
    norm(layer.ffn_norm, layer.ffn_norm_bias, pass.residual, pass.ffn_in);
  }
  const Pass& middle = output ? pass : from;
  if (gate || up) {
    if (!output && &from != &pass) copy(from.up, layer.up.outputs, pass.up);
    for (const Matrix m : {Matrix::gate, Matrix::up})
      if (m == Matrix::gate ? gate : up)
        linear(m, middle.ffn_in, mask(m), false, pass.up + layer.up.at[part_of(m)], layer.up.outputs);
    cuda::GateRowsArgs args;
    args.gate = has(Matrix::gate) ? cuda::Gate::swiglu : cuda::Gate::relu;
    args.x = pass.up;
    args.up = has(Matrix::gate) ? pass.up + layer.up.at[1] : nullptr;
    args.stride = layer.up.outputs;
    args.M = windows_ * window_;
    args.K = shard_.config.n_ff;
    args.y = pass.ffn_down;
    cuda::launch_gate_rows(shard_.card.device, shard_.card.stream, args);
  }
  copy(middle.residual, width, pass.out);
  linear(Matrix::down, gate || up ? pass.ffn_down : from.ffn_down, mask(Matrix::down), true, pass.out, width);
}

void CudaBlock::restart() {
  constexpr std::array<Matrix, 3> kFirst = {Matrix::q, Matrix::k, Matrix::v};
  rerun(kFirst, {}, kept_, kept_);
}

double CudaBlock::error(Matrix changed, const Block::Masks& masks, bool keep) {
  Pass& pass = keep ? kept_ : trial_;
  shard_.card.device.use();
  rerun({&changed, 1}, masks, kept_, pass);
  return distance(pass.out, dense_out_) / scale_;
}

double CudaBlock::distance(const float* a, const float* b) {
  cuda::launch_squared_distance(shard_.card.device, shard_.card.stream, a, b, windows_ * window_ * shard_.config.n_embd,
                                parts_.as<double>());
  shard_.card.stream.synchronize();
  std::array<double, cuda::kDistanceParts> parts = {};
  parts_.download(std::as_writable_bytes(std::span(parts)));
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

}  // namespace lacuna::model
