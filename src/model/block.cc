#include "model/block.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace lacuna::model {
namespace {

constexpr std::array<const char*, kMatrices> kNames = {"attn_q",   "attn_k", "attn_v",  "attn_output",
                                                       "ffn_gate", "ffn_up", "ffn_down"};

}  // namespace

Input input_of(Matrix matrix) {
  switch (matrix) {
    case Matrix::q:
    case Matrix::k:
    case Matrix::v:
      return Input::attn_in;
    case Matrix::o:
      return Input::attn_out;
    case Matrix::gate:
    case Matrix::up:
      return Input::ffn_in;
    case Matrix::down:
      break;
  }
  return Input::ffn_down;
}

std::string tensor_name(int64_t layer, Matrix matrix) {
  return fmt::format("blk.{}.{}", layer, kNames[size_t(matrix)]);
}

Block::Block(const io::Checkpoint& checkpoint, const Config& config, int64_t layer, int64_t windows, int64_t window,
             ThreadPool& pool)
    : config_(config), pool_(pool), windows_(windows), window_(window) {
  const auto norm_weights = [&](const char* part) {
    const std::string name = fmt::format("blk.{}.{}", layer, part);
    NormWeights out{read_vector(checkpoint.require(name + ".weight")), {}};
    if (config.norm == Norm::layer) out.bias = read_vector(checkpoint.require(name + ".bias"));
    return out;
  };
  attn_norm_ = norm_weights("attn_norm");
  ffn_norm_ = norm_weights("ffn_norm");
  if (config.qk_norm) {
    q_norm_ = read_vector(checkpoint.require(fmt::format("blk.{}.attn_q_norm.weight", layer)));
    k_norm_ = read_vector(checkpoint.require(fmt::format("blk.{}.attn_k_norm.weight", layer)));
  }
  const int64_t T = tokens();
  int64_t widest = 0;
  for (size_t m = 0; m < size_t(kMatrices); ++m) {
    if (Matrix(m) == Matrix::gate && config.mlp != Mlp::swiglu) continue;
    const std::string name = tensor_name(layer, Matrix(m));
    const io::Tensor& tensor = checkpoint.require(name + ".weight");
    kernels::WeightView view{tensor.name, tensor.layout, tensor.shape, tensor.bytes, {}, tensor.params};
    if (const io::Tensor* bias = checkpoint.find(name + ".bias")) view.bias = biases_[m] = read_vector(*bias);
    groups_[m] = kernels::make_cpu_linear_group({&view, 1}, pool);
    groups_[m]->reserve(T);
    bytes_[m] = int64_t(tensor.bytes.size());
    widths_[m] = tensor.shape.N;
    widest = std::max(widest, tensor.shape.K);
  }
  masked_.resize(size_t(T * widest));
  const size_t half = config.rope.inv_freq.size();
  cos_.resize(size_t(window) * half);
  sin_.resize(size_t(window) * half);
  for (int64_t p = 0; p < window; ++p)
    rotary_row(config.rope, p, cos_.data() + size_t(p) * half, sin_.data() + size_t(p) * half);
  cache_ = HugeBuffer(size_t(2 * config.n_kv_heads * window * config.head_dim) * sizeof(float), false);
}

Block::~Block() = default;

void Block::linear(Matrix matrix, const std::vector<float>& in, const Mask& mask, int64_t dense_prefix,
                   std::vector<float>& out) {
  const int64_t T = tokens(), K = int64_t(in.size()) / T, N = widths_[size_t(matrix)];
  const float* x = in.data();
  if (mask.t > 0) {
    pool_.parallel_for(T, 8, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m)
        mask_inactive(x + m * K, mask.norms, m % window_ < dense_prefix ? 0 : mask.t, K, masked_.data() + m * K,
                      mask.group);
    });
    x = masked_.data();
  }
  out.resize(size_t(T * N));
  const std::array<kernels::Output, 1> y = {{{out.data(), N}}};
  groups_[size_t(matrix)]->run({x, T, K}, y);
}

void Block::attend(const Pass& in, std::vector<float>& attended) {
  const int64_t d = config_.head_dim, q_width = config_.n_heads * d, kv_width = config_.n_kv_heads * d;
  rotated_q_ = in.q;
  rotated_k_ = in.k;
  float *q = rotated_q_.data(), *k = rotated_k_.data();
  if (config_.qk_norm) {
    kernels::rms_norm(pool_, q, q_norm_.data(), config_.norm_eps, tokens() * config_.n_heads, d, q);
    kernels::rms_norm(pool_, k, k_norm_.data(), config_.norm_eps, tokens() * config_.n_kv_heads, d, k);
  }
  attended.resize(size_t(tokens() * q_width));
  auto* keys = reinterpret_cast<float*>(cache_.data());
  const kernels::KvLayer cache{kernels::KvType::f32, keys, keys + window_ * kv_width, window_, config_.n_kv_heads, d};
  for (int64_t w = 0; w < windows_; ++w, q += window_ * q_width, k += window_ * kv_width) {
    if (config_.positions == Positions::rope) {
      const Rope& rope = config_.rope;
      kernels::rope(pool_, q, window_, config_.n_heads, d, q_width, cos_.data(), sin_.data(), rope.n_rot,
                    rope.adjacent);
      kernels::rope(pool_, k, window_, config_.n_kv_heads, d, kv_width, cos_.data(), sin_.data(), rope.n_rot,
                    rope.adjacent);
    }
    kernels::kv_store(pool_, cache, 0, window_, k, kv_width, in.v.data() + w * window_ * kv_width, kv_width);
    kernels::AttentionArgs args;
    args.q = q;
    args.q_stride = q_width;
    args.M = window_;
    args.n_heads = config_.n_heads;
    args.cache = cache;
    args.window = config_.window;
    args.scale = 1 / std::sqrt(float(d));
    args.out = attended.data() + w * window_ * q_width;
    args.out_stride = q_width;
    kernels::attention(pool_, args);
  }
}

void Block::run(const float* x, const Masks& masks, int64_t dense_prefix, Pass& pass) {
  pass.attn_in.resize(size_t(tokens() * config_.n_embd));
  if (config_.norm_first)
    apply_norm(config_, pool_, attn_norm_, x, tokens(), pass.attn_in.data());
  else
    std::copy_n(x, pass.attn_in.size(), pass.attn_in.data());
  constexpr std::array<Matrix, 3> kFirst = {Matrix::q, Matrix::k, Matrix::v};
  rerun(x, kFirst, masks, dense_prefix, pass, pass);
}

void Block::rerun(const float* x, std::span<const Matrix> changed, const Masks& masks, int64_t dense_prefix,
                  const Pass& from, Pass& pass) {
  const auto is = [&](Matrix m) { return std::find(changed.begin(), changed.end(), m) != changed.end(); };
  const auto mask = [&](Matrix m) { return masks[size_t(m)]; };
  const bool attention = is(Matrix::q) || is(Matrix::k) || is(Matrix::v);
  const bool output = attention || is(Matrix::o);
  const size_t count = size_t(tokens() * config_.n_embd);
  if (attention) {
    for (const auto& [matrix, buffer] :
         {std::pair{Matrix::q, &Pass::q}, {Matrix::k, &Pass::k}, {Matrix::v, &Pass::v}}) {
      if (is(matrix))
        linear(matrix, from.attn_in, mask(matrix), dense_prefix, pass.*buffer);
      else if (&from != &pass)
        pass.*buffer = from.*buffer;
    }
    attend(pass, pass.attended);
  }
  if (output) {
    linear(Matrix::o, attention ? pass.attended : from.attended, mask(Matrix::o), dense_prefix, pass.residual);
    kernels::add(pool_, x, int64_t(count), pass.residual.data());
    if (!config_.norm_first)
      apply_norm(config_, pool_, attn_norm_, pass.residual.data(), tokens(), pass.residual.data());
    pass.ffn_in.resize(count);
    if (config_.norm_first)
      apply_norm(config_, pool_, ffn_norm_, pass.residual.data(), tokens(), pass.ffn_in.data());
    else
      pass.ffn_in = pass.residual;
  }
  const Pass& middle = output ? pass : from;
  const bool gate = has(Matrix::gate) && (output || is(Matrix::gate)), up = output || is(Matrix::up);
  if (gate) linear(Matrix::gate, middle.ffn_in, mask(Matrix::gate), dense_prefix, pass.gate);
  if (up) linear(Matrix::up, middle.ffn_in, mask(Matrix::up), dense_prefix, pass.up);
  if (gate || up) {
    const std::vector<float>&gated = gate ? pass.gate : from.gate, &wide = up ? pass.up : from.up;
    pass.ffn_down.resize(wide.size());
    apply_activation(config_, pool_, gated.data(), wide.data(), int64_t(wide.size()), pass.ffn_down.data());
  }
  linear(Matrix::down, gate || up ? pass.ffn_down : from.ffn_down, mask(Matrix::down), dense_prefix, pass.out);
  kernels::add(pool_, middle.residual.data(), int64_t(count), pass.out.data());
  if (!config_.norm_first) apply_norm(config_, pool_, ffn_norm_, pass.out.data(), tokens(), pass.out.data());
}

std::vector<float> column_norms(const io::Checkpoint& checkpoint, const Config& config, int64_t layer, Input input,
                                ThreadPool& pool) {
  const int64_t K = input_widths(config)[size_t(input)];
  std::vector<double> squares(static_cast<size_t>(K), 0.0);
  constexpr int64_t kRows = 256;
  for (size_t m = 0; m < size_t(kMatrices); ++m) {
    if (input_of(Matrix(m)) != input || (Matrix(m) == Matrix::gate && config.mlp != Mlp::swiglu)) continue;
    const io::Tensor& tensor = checkpoint.require(tensor_name(layer, Matrix(m)) + ".weight");
    // Squares are added up in the order of the rows, so that the norms do not depend on the number of threads.
    for (int64_t first = 0; first < tensor.shape.N; first += kRows * pool.size()) {
      std::vector<std::vector<double>> parts(static_cast<size_t>(pool.size()));
      pool.parallel_for(pool.size(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
          const int64_t row0 = first + part * kRows, rows = std::min(kRows, tensor.shape.N - row0);
          if (rows <= 0) continue;
          std::vector<float> w(static_cast<size_t>(rows * K));
          layout::decode_rows(*tensor.layout, tensor.shape, tensor.bytes, row0, rows, w.data(), tensor.params);
          std::vector<double>& sum = parts[size_t(part)];
          sum.assign(static_cast<size_t>(K), 0.0);
          for (int64_t n = 0; n < rows; ++n)
            for (int64_t k = 0; k < K; ++k)
              sum[size_t(k)] += double(w[size_t(n * K + k)]) * double(w[size_t(n * K + k)]);
        }
      });
      for (const std::vector<double>& part : parts)
        for (size_t k = 0; k < part.size(); ++k) squares[k] += part[k];
    }
  }
  std::vector<float> norms;
  for (const double square : squares) norms.push_back(float(std::sqrt(square)));
  return norms;
}

}  // namespace lacuna::model
