// Products with matrices that are made from parameters, against the whole matrix in autograd's graph.
#include "compress/parametrized.h"

#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"

namespace lacuna::compress {
namespace {

at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  Rng rng(seed);
  at::Tensor out = at::empty(shape, at::kDouble);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<double>()[i] = rng.normal();
  return out;
}

/// Row n is sin(a_n times the sum of its n parameters), a fixed: parts of different lengths, the first empty.
class Sines : public Parametrized {
 public:
  Sines() : a_(random({5, 7}, 1)), b_(random({10}, 2).set_requires_grad(true)) {}
  int64_t N() const override { return 5; }
  int64_t K() const override { return 7; }
  std::vector<at::Tensor> parameters() const override { return {b_}; }
  std::pair<int64_t, int64_t> part(int64_t first, int64_t rows) const override {
    const auto before = [](int64_t n) { return n * (n - 1) / 2; };
    return {before(first), before(first + rows) - before(first)};
  }
  at::Tensor rows(int64_t first, int64_t rows, const std::vector<at::Tensor>& parts) const override {
    ++made;
    most_rows = std::max(most_rows, rows);
    std::vector<at::Tensor> out;
    int64_t begin = 0;
    for (int64_t n = first; n < first + rows; begin += n, ++n)
      out.push_back((a_[n] * parts[0].narrow(0, begin, n).sum()).sin());
    return at::stack(out);
  }
  mutable int64_t made = 0, most_rows = 0;

 private:
  at::Tensor a_, b_;
};

TEST(Product, HasTheValueAndTheGradientsOfTheGraph) {
  const c10::AutoGradMode gradients(true);
  const at::Tensor dy = random({2, 3, 5}, 4);
  for (const bool x_has : {false, true}) {
    const Sines whole;
    const at::Tensor x = random({2, 3, 7}, 3).set_requires_grad(x_has);
    const at::Tensor y = at::matmul(x, whole.weight().t());
    (y * dy).sum().backward();
    for (const int64_t most : {1, 15, 1000}) {  // one row, two, all
      const Sines W;
      const at::Tensor in = x.detach().clone().set_requires_grad(x_has);
      const at::Tensor got = product(in, W, most);
      EXPECT_TRUE(at::allclose(got, y, 1e-12, 1e-14));
      (got * dy).sum().backward();
      EXPECT_TRUE(at::allclose(W.parameters()[0].grad(), whole.parameters()[0].grad(), 1e-12, 1e-14)) << most;
      EXPECT_EQ(in.grad().defined(), x_has);
      if (x_has) {
        EXPECT_TRUE(at::allclose(in.grad(), x.grad(), 1e-12, 1e-14)) << most;
      }
      EXPECT_EQ(W.most_rows, most == 1 ? 1 : most == 15 ? 2 : 5);
      EXPECT_EQ(W.made, 2 * (most == 1 ? 5 : most == 15 ? 3 : 1));  // forward and again
    }
  }
}

TEST(Product, AddsUpOverUsesOfTheSameMatrix) {
  const c10::AutoGradMode gradients(true);
  const Sines W, whole;
  const at::Tensor x = random({4, 7}, 5), z = random({2, 7}, 6);
  (product(x, W, 14).square().sum() + product(z, W, 14).sum()).backward();
  (at::matmul(x, whole.weight().t()).square().sum() + at::matmul(z, whole.weight().t()).sum()).backward();
  EXPECT_TRUE(at::allclose(W.parameters()[0].grad(), whole.parameters()[0].grad(), 1e-12, 1e-14));
}

TEST(Product, WithoutGradientsKeepsNoGraph) {
  const c10::NoGradGuard no_grad;
  const Sines W;
  EXPECT_FALSE(product(random({4, 7}, 5), W).requires_grad());
}

}  // namespace
}  // namespace lacuna::compress
