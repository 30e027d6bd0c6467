#include "compress/attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

namespace lacuna::compress {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Queries first .. first + queries of every window and the keys that one of them sees.
struct QueryBlock {
  int64_t first, queries, first_key, keys;
};

/// The walk over blocks of queries. Heads that share a key are rows of one product.
class QueryBlocks {
 public:
  QueryBlocks(const at::Tensor& q, const at::Tensor& k, int64_t window, int64_t most_scores)
      : windows_(q.size(0)),
        kv_heads_(k.size(1)),
        shared_(q.size(1) / k.size(1)),
        tokens_(q.size(2)),
        window_(window),
        queries_(std::clamp<int64_t>(most_scores / (q.size(0) * q.size(1) * q.size(2)), 1, q.size(2))) {}

  template <typename F>
  void each(const F& f) const {
    for (int64_t first = 0; first < tokens_; first += queries_) {
      const int64_t queries = std::min(queries_, tokens_ - first),
                    first_key = window_ > 0 ? std::max<int64_t>(0, first - window_ + 1) : 0;
      f(QueryBlock{first, queries, first_key, first + queries - first_key});
    }
  }

  /// x: [windows, n_heads, tokens, d] -> [windows, n_kv_heads, heads that share a key * queries, d].
  at::Tensor queries_of(const at::Tensor& x, const QueryBlock& block) const {
    return x.narrow(2, block.first, block.queries).unflatten(1, {kv_heads_, shared_}).flatten(2, 3);
  }
  /// The inverse: writes a block's rows to x.
  void put(const at::Tensor& rows, const QueryBlock& block, const at::Tensor& x) const {
    x.narrow(2, block.first, block.queries).copy_(rows.unflatten(2, {shared_, block.queries}).flatten(1, 2));
  }
  /// x: [windows, n_kv_heads, tokens, d]
  static at::Tensor keys_of(const at::Tensor& x, const QueryBlock& block) {
    return x.narrow(2, block.first_key, block.keys);
  }

  /// Rows of the softmax: [windows, n_kv_heads, heads that share a key * queries, keys].
  at::Tensor shares(const at::Tensor& queries, const at::Tensor& keys, const QueryBlock& block) const {
    at::Tensor scores = at::matmul(queries, keys.transpose(-1, -2)).div_(std::sqrt(double(queries.size(-1))));
    const auto positions = [&](int64_t first, int64_t count) {
      return at::arange(first, first + count, scores.options().dtype(at::kLong));
    };
    const at::Tensor distance =
        positions(block.first, block.queries).unsqueeze(1) - positions(block.first_key, block.keys).unsqueeze(0);
    at::Tensor hidden = distance < 0;
    if (window_ > 0) hidden = hidden.logical_or(distance >= window_);
    scores.view({windows_, kv_heads_, shared_, block.queries, block.keys}).masked_fill_(hidden, -INFINITY);
    return at::softmax(scores, -1);
  }

 private:
  int64_t windows_, kv_heads_, shared_, tokens_, window_;
  int64_t queries_;  // of a block
};

struct Attention : torch::autograd::Function<Attention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            int64_t window, int64_t most_scores) {
    context->save_for_backward({q, k, v});
    context->saved_data["window"] = window;
    context->saved_data["most_scores"] = most_scores;
    const QueryBlocks blocks(q, k, window, most_scores);
    at::Tensor out = at::empty(q.sizes(), q.options());
    blocks.each([&](const QueryBlock& block) {
      const at::Tensor shares = blocks.shares(blocks.queries_of(q, block), QueryBlocks::keys_of(k, block), block);
      blocks.put(at::matmul(shares, QueryBlocks::keys_of(v, block)), block, out);
    });
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &dout = gradients[0];
    const QueryBlocks blocks(q, k, context->saved_data["window"].toInt(), context->saved_data["most_scores"].toInt());
    const double scale = 1 / std::sqrt(double(q.size(-1)));
    at::Tensor dq = at::empty(q.sizes(), q.options()), dk = at::zeros(k.sizes(), k.options()),
               dv = at::zeros(v.sizes(), v.options());
    blocks.each([&](const QueryBlock& block) {
      const at::Tensor queries = blocks.queries_of(q, block), keys = QueryBlocks::keys_of(k, block);
      const at::Tensor shares = blocks.shares(queries, keys, block), d = blocks.queries_of(dout, block);
      QueryBlocks::keys_of(dv, block).add_(at::matmul(shares.transpose(-1, -2), d));
      const at::Tensor dshares = at::matmul(d, QueryBlocks::keys_of(v, block).transpose(-1, -2));
      const at::Tensor dscores = at::_softmax_backward_data(dshares, shares, -1, shares.scalar_type()).mul_(scale);
      blocks.put(at::matmul(dscores, keys), block, dq);
      QueryBlocks::keys_of(dk, block).add_(at::matmul(dscores.transpose(-1, -2), queries));
    });
    return {dq, dk, dv, {}, {}};
  }
};

}  // namespace

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window,
                            int64_t most_scores) {
  return Attention::apply(q, k, v, window, most_scores);
}

}  // namespace lacuna::compress
