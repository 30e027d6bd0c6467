#include "compress/net.h"

#include <c10/core/GradMode.h>

#include <cmath>
#include <vector>

#include "compress/attention.h"
#include "core/error.h"
#include "io/gguf_model.h"
#include "kernels/ops.h"
#include "layout/layout.h"

namespace lacuna::compress {
namespace {

at::Tensor with_bias(const at::Tensor& y, const at::Tensor& bias) { return bias.defined() ? y + bias : y; }

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return with_bias(at::matmul(x, weight.t()), bias);
}

at::Tensor linear(const at::Tensor& x, const Layer& layer, model::Matrix matrix) {
  const auto m = size_t(matrix);
  return layer.product[m] ? with_bias(layer.product[m](x), layer.bias[m]) : linear(x, layer.weight[m], layer.bias[m]);
}

}  // namespace

Net::Net(const io::Checkpoint& checkpoint, at::Device device, ThreadPool* pool)
    : checkpoint_(checkpoint), config_(model::read_config(checkpoint)), device_(device), pool_(pool) {
  // GGUF files of type "llama" hold adjacent rotary pairs, and read() brings a folder's rows into that order.
  adjacent_ = config_.rope.adjacent || checkpoint.architecture() == "llama";
  embedding_ = read_on_cpu(checkpoint.require("token_embd.weight"));
  if (embedding_.size(1) != config_.n_embd) {
    project_in_ = read(checkpoint.require("token_embd_proj_in.weight"));
    project_in_bias_ = maybe("token_embd_proj_in.bias");
  }
  if (config_.positions == model::Positions::learned) positions_ = read(checkpoint.require("position_embd.weight"));
}

Head Net::load_head() const {
  Head head;
  head.weight = maybe("output.weight");
  head.bias = maybe("output.bias");
  if (!head.weight.defined()) head.weight = embedding_.to(device_);
  if (project_in_.defined()) {
    head.project_out = read(checkpoint_.require("output_proj.weight"));
    head.project_out_bias = maybe("output_proj.bias");
  }
  if (checkpoint_.metadata().boolean(config_.architecture + ".final_layer_norm").value_or(config_.norm_first))
    head.norm = {read(checkpoint_.require("output_norm.weight")), maybe("output_norm.bias")};
  return head;
}

at::Tensor Net::read(const io::Tensor& tensor) const { return read_on_cpu(tensor).to(device_); }

at::Tensor Net::read_on_cpu(const io::Tensor& tensor) const {
  const auto [N, K] = tensor.shape;
  at::Tensor out = at::empty({N, K}, at::kFloat);
  layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, 0, N, out.data_ptr<float>(), tensor.params);
  const bool vector = !io::is_matrix(tensor);
  if (vector) out = out.reshape({-1});
  if (const std::vector<int64_t> order = io::gguf_row_order(checkpoint_, tensor); !order.empty())
    out = out.index_select(0, at::tensor(order, at::kLong));
  if (!at::isfinite(out).all().item<bool>())
    throw Error("{}: tensor {} holds NaN or infinity; such a model cannot be compressed", checkpoint_.path(),
                tensor.name);
  return out;
}

at::Tensor Net::maybe(const std::string& name) const {
  const io::Tensor* tensor = checkpoint_.find(name);
  return tensor == nullptr ? at::Tensor() : read(*tensor);
}

Layer Net::load_layer(int64_t index) const {
  Layer layer = load_vectors(index);
  for (size_t m = 0; m < size_t(model::kMatrices); ++m) {
    if (model::Matrix(m) == model::Matrix::gate && config_.mlp != model::Mlp::swiglu) continue;
    layer.weight[m] = read(checkpoint_.require(model::tensor_name(index, model::Matrix(m)) + ".weight"));
  }
  return layer;
}

Layer Net::load_vectors(int64_t index) const {
  Layer layer;
  for (size_t m = 0; m < size_t(model::kMatrices); ++m) {
    if (model::Matrix(m) == model::Matrix::gate && config_.mlp != model::Mlp::swiglu) continue;
    layer.bias[m] = maybe(model::tensor_name(index, model::Matrix(m)) + ".bias");
  }
  const auto norm = [&](const char* part) {
    const std::string name = fmt::format("blk.{}.{}", index, part);
    return Norm{read(checkpoint_.require(name + ".weight")), maybe(name + ".bias")};
  };
  layer.attn_norm = norm("attn_norm");
  layer.ffn_norm = norm("ffn_norm");
  if (config_.qk_norm) {
    layer.q_norm = read(checkpoint_.require(fmt::format("blk.{}.attn_q_norm.weight", index)));
    layer.k_norm = read(checkpoint_.require(fmt::format("blk.{}.attn_k_norm.weight", index)));
  }
  return layer;
}

at::Tensor Net::norm(const Norm& weights, const at::Tensor& x) const {
  if (config_.norm == model::Norm::layer)
    return at::layer_norm(x, {x.size(-1)}, weights.weight, weights.bias, double(config_.norm_eps));
  return x * at::rsqrt(x.square().mean(-1, true) + double(config_.norm_eps)) * weights.weight;
}

/// x: [windows, heads, tokens, head_dim]; cos, sin: [tokens, n_rot / 2].
at::Tensor Net::rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) const {
  const int64_t n_rot = config_.rope.n_rot, half = n_rot / 2;
  at::Tensor first, second;
  const at::Tensor turned = x.narrow(-1, 0, n_rot);
  if (adjacent_) {
    const at::Tensor pairs = turned.unflatten(-1, {half, 2});
    first = pairs.select(-1, 0);
    second = pairs.select(-1, 1);
  } else {
    first = turned.narrow(-1, 0, half);
    second = turned.narrow(-1, half, half);
  }
  const at::Tensor a = first * cos - second * sin, b = second * cos + first * sin;
  const at::Tensor out = adjacent_ ? at::stack({a, b}, -1).flatten(-2) : at::cat({a, b}, -1);
  return n_rot == x.size(-1) ? out : at::cat({out, x.narrow(-1, n_rot, x.size(-1) - n_rot)}, -1);
}

/// q, k, v: [windows, tokens, heads * head_dim] -> [windows, tokens, n_heads * head_dim].
at::Tensor Net::attend(const Layer& layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const int64_t windows = q.size(0), tokens = q.size(1), d = config_.head_dim;
  const auto heads = [&](const at::Tensor& x) { return x.reshape({windows, tokens, -1, d}); };
  const Norm q_norm{layer.q_norm, {}}, k_norm{layer.k_norm, {}};
  at::Tensor queries = heads(q), keys = heads(k);
  if (config_.qk_norm) {
    queries = norm(q_norm, queries);
    keys = norm(k_norm, keys);
  }
  queries = queries.transpose(1, 2);
  keys = keys.transpose(1, 2);
  const at::Tensor values = heads(v).transpose(1, 2);
  if (config_.positions == model::Positions::rope) {
    const model::Rope& rope = config_.rope;
    // Angles in double: float loses digits of a large position times a frequency.
    const at::Tensor position = at::arange(tokens, at::device(device_).dtype(at::kDouble));
    const at::Tensor angle = position.unsqueeze(1) * at::tensor(rope.inv_freq, at::kFloat).to(device_).to(at::kDouble);
    const at::Tensor cos = (at::cos(angle) * double(rope.attention_factor)).to(at::kFloat);
    const at::Tensor sin = (at::sin(angle) * double(rope.attention_factor)).to(at::kFloat);
    queries = rotate(queries, cos, sin);
    keys = rotate(keys, cos, sin);
  }
  if (pool_ != nullptr && device_.is_cpu() && !c10::GradMode::is_enabled())
    return attend_with_kernels(queries, keys, values);
  return causal_attention(queries, keys, values, config_.window).transpose(1, 2).flatten(2);
}

/// q, k, v: [windows, heads, tokens, head_dim], rotated -> [windows, tokens, n_heads * head_dim].
at::Tensor Net::attend_with_kernels(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const int64_t windows = q.size(0), tokens = q.size(2), d = config_.head_dim, width = config_.n_heads * d,
                kv_width = config_.n_kv_heads * d;
  const at::Tensor queries = q.transpose(1, 2).contiguous(), keys = k.transpose(1, 2).contiguous(),
                   values = v.transpose(1, 2).contiguous();
  at::Tensor cache = at::empty({2, tokens, kv_width}, at::kFloat),
             out = at::empty({windows, tokens, width}, at::kFloat);
  const kernels::KvLayer layer{
      kernels::KvType::f32, cache[0].data_ptr<float>(), cache[1].data_ptr<float>(), tokens, config_.n_kv_heads, d};
  for (int64_t w = 0; w < windows; ++w) {
    kernels::kv_store(*pool_, layer, 0, tokens, keys[w].data_ptr<float>(), kv_width, values[w].data_ptr<float>(),
                      kv_width);
    kernels::AttentionArgs args;
    args.q = queries[w].data_ptr<float>();
    args.q_stride = width;
    args.M = tokens;
    args.n_heads = config_.n_heads;
    args.cache = layer;
    args.window = config_.window;
    args.scale = 1 / std::sqrt(float(d));
    args.out = out[w].data_ptr<float>();
    args.out_stride = width;
    kernels::attention(*pool_, args);
  }
  return out;
}

at::Tensor Net::embed(const at::Tensor& ids) const {
  at::Tensor x = embedding_.index_select(0, ids.to(at::kCPU).reshape({-1})).to(device_);
  x = x.reshape({ids.size(0), ids.size(1), -1});
  if (project_in_.defined()) x = linear(x, project_in_, project_in_bias_);
  if (positions_.defined()) x = x + positions_.narrow(0, config_.position_offset, ids.size(1));
  return x;
}

std::pair<at::Tensor, at::Tensor> Net::to_last_input(const Layer& layer, const at::Tensor& hidden,
                                                     const Tap& tap) const {
  using model::Matrix;
  const auto show = [&](model::Input input, const at::Tensor& x) {
    if (tap) tap(input, x.flatten(0, 1));
  };
  at::Tensor in = config_.norm_first ? norm(layer.attn_norm, hidden) : hidden;
  show(model::Input::attn_in, in);
  const at::Tensor attended =
      attend(layer, linear(in, layer, Matrix::q), linear(in, layer, Matrix::k), linear(in, layer, Matrix::v));
  show(model::Input::attn_out, attended);
  at::Tensor x = hidden + linear(attended, layer, Matrix::o);
  if (!config_.norm_first) x = norm(layer.attn_norm, x);
  in = config_.norm_first ? norm(layer.ffn_norm, x) : x;
  show(model::Input::ffn_in, in);
  at::Tensor wide = linear(in, layer, Matrix::up);
  wide = config_.mlp == model::Mlp::swiglu ? at::silu(linear(in, layer, Matrix::gate)) * wide : at::relu(wide);
  show(model::Input::ffn_down, wide);
  return {x, wide};
}

void Net::inputs(const Layer& layer, const at::Tensor& hidden, const Tap& tap) const {
  to_last_input(layer, hidden, tap);
}

at::Tensor Net::forward(const Layer& layer, const at::Tensor& hidden, const Tap& tap) const {
  const auto [before, wide] = to_last_input(layer, hidden, tap);
  const at::Tensor x = before + linear(wide, layer, model::Matrix::down);
  return config_.norm_first ? x : norm(layer.ffn_norm, x);
}

at::Tensor Net::logits(const Head& head, const at::Tensor& hidden) const {
  at::Tensor x = head.norm.weight.defined() ? norm(head.norm, hidden) : hidden;
  if (head.project_out.defined()) x = linear(x, head.project_out, head.project_out_bias);
  return linear(x, head.weight, head.bias);
}

}  // namespace lacuna::compress
