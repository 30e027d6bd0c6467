// Attention in blocks of queries against the plain chain of operations in double.
#include "compress/attention.h"

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/rng.h"

namespace lacuna::compress {
namespace {

at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  Rng rng(seed);
  at::Tensor out = at::empty(shape, at::kFloat);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] = float(rng.normal());
  return out;
}

/// All scores at once, key heads repeated.
at::Tensor plain(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t window) {
  const int64_t shared = q.size(1) / k.size(1);
  const at::Tensor keys = k.repeat_interleave(shared, 1), values = v.repeat_interleave(shared, 1);
  const at::Tensor position = at::arange(q.size(2)), distance = position.unsqueeze(1) - position.unsqueeze(0);
  at::Tensor hidden = distance < 0;
  if (window > 0) hidden = hidden.logical_or(distance >= window);
  const at::Tensor scores = at::matmul(q, keys.transpose(-1, -2)) / std::sqrt(double(q.size(3)));
  return at::matmul(at::softmax(scores.masked_fill(hidden, -INFINITY), -1), values);
}

struct Case {
  int64_t windows, heads, kv_heads, tokens, d, window, most_scores;
};

// One block; a query at a time; blocks that do not divide the tokens; fewer keys than a sliding window; and its edges.
const Case kCases[] = {{1, 1, 1, 1, 2, 0, 1 << 20},     {2, 4, 4, 17, 8, 0, 1 << 20},
                       {2, 4, 2, 17, 8, 0, 1},          {2, 6, 2, 17, 4, 0, 6 * 17 * 2 * 5},
                       {1, 4, 1, 23, 6, 5, 4 * 23 * 7}, {2, 2, 2, 23, 6, 1, 2 * 23 * 2 * 4},
                       {1, 3, 3, 9, 4, 50, 3 * 9 * 4}};

TEST(CausalAttention, IsThePlainChainWithItsGradients) {
  const c10::AutoGradMode gradients(true);
  for (const Case& c : kCases) {
    const at::Tensor q = random({c.windows, c.heads, c.tokens, c.d}, 1),
                     k = random({c.windows, c.kv_heads, c.tokens, c.d}, 2),
                     v = random({c.windows, c.kv_heads, c.tokens, c.d}, 3), dout = random(q.sizes(), 4);
    std::vector<at::Tensor> want, got;
    for (const bool in_double : {true, false}) {
      std::vector<at::Tensor> leaves;
      for (const at::Tensor& x : {q, k, v})
        leaves.push_back(x.to(in_double ? at::kDouble : at::kFloat).clone().set_requires_grad(true));
      const at::Tensor out = in_double ? plain(leaves[0], leaves[1], leaves[2], c.window)
                                       : causal_attention(leaves[0], leaves[1], leaves[2], c.window, c.most_scores);
      (out * dout).sum().backward();
      std::vector<at::Tensor>& all = in_double ? want : got;
      all = {out.detach()};
      for (const at::Tensor& leaf : leaves) all.push_back(leaf.grad());
    }
    // Sums of some tens of products of values about 1, in float32: 2^-24 times a hundred.
    for (size_t i = 0; i < want.size(); ++i)
      EXPECT_LE((got[i].to(at::kDouble) - want[i]).abs().max().item<double>(), 1e-5)
          << i << " with " << c.tokens << " tokens, window " << c.window << ", " << c.most_scores << " scores";
  }
}

TEST(CausalAttention, TakesViewsAndGivesTheSameBytesTwice) {
  const c10::AutoGradMode gradients(true);
  const auto once = [] {
    at::Tensor qkv = random({2, 19, 3, 4, 8}, 5).set_requires_grad(true);  // windows, tokens, q k v, heads, d
    const auto of = [&](int64_t i) { return qkv.select(2, i).transpose(1, 2); };
    const at::Tensor out = causal_attention(of(0), of(1), of(2), 0, 2 * 4 * 19 * 6);
    out.square().sum().backward();
    return std::vector<at::Tensor>{out.detach(), qkv.grad()};
  };
  const std::vector<at::Tensor> a = once(), b = once();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i]));
  const at::Tensor qkv = random({2, 19, 3, 4, 8}, 5).to(at::kDouble).set_requires_grad(true);
  const auto of = [&](int64_t i) { return qkv.select(2, i).transpose(1, 2); };
  const at::Tensor want = plain(of(0), of(1), of(2), 0);
  want.square().sum().backward();
  EXPECT_TRUE(at::allclose(a[0].to(at::kDouble), want.detach(), 1e-5, 1e-6));
  EXPECT_TRUE(at::allclose(a[1].to(at::kDouble), qkv.grad(), 1e-5, 1e-5));
}

}  // namespace
}  // namespace lacuna::compress
