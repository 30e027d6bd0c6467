// eval/spqt_baselines.h
#include "eval/spqt_baselines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "model/synth.h"

namespace lacuna::eval {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

constexpr float kNothing = std::numeric_limits<float>::infinity();  // no finite input is active

struct Case {
  HugeBuffer bytes;
  kernels::WeightView weight;
  std::vector<float> x;

  Case(layout::Id id, int64_t N, int64_t K, ThreadPool& pool, layout::Params params = {})
      : bytes(model::random_matrix(layout::get(id), {N, K}, params, 5, pool)),
        weight{"w", &layout::get(id), {N, K}, bytes.bytes(), {}, params},
        x(size_t(K)) {
    Rng rng{uint64_t(N)};
    for (float& value : x) value = float(rng.normal());
    x[size_t(K / 2)] = 0.75f;  // equal to a threshold below: active
  }

  /// Compares with the double-precision product of the active inputs.
  template <class Product>
  void check(Product& product, float threshold) const {
    const auto [N, K] = weight.shape;
    std::vector<int32_t> active;
    for (int64_t k = 0; k < K; ++k)
      if (!(std::fabs(x[size_t(k)]) < threshold)) active.push_back(int32_t(k));
    std::vector<float> y(size_t(N), NAN), expected(size_t(N), NAN), w(size_t(N * K));
    product.run(x.data(), threshold, y.data());
    kernels::reference_linear(weight, {x.data(), 1, K, active.data(), int64_t(active.size())}, {expected.data(), N});
    layout::decode_rows(*weight.layout, weight.shape, weight.bytes, 0, N, w.data(), weight.params);
    const auto largest = [](const std::vector<float>& values) {
      float out = 0;
      for (const float value : values) out = std::max(out, std::fabs(value));
      return double(out);
    };
    // Floats: K eps sum |w x|, of which the sum is at most as below. Zigzag kernels round a factor x * scale to half of
    // 1/32512 of the largest; times a code it is that part of x * (range of a block), which is at most 2.5 max |w|.
    const double size = double(active.size()) * largest(w) * largest(x);
    const double bound = size * (double(K) * std::numeric_limits<float>::epsilon() + 2.5 * 0.5 / 32512);
    for (int64_t n = 0; n < N; ++n)
      ASSERT_NEAR(y[size_t(n)], expected[size_t(n)], bound) << N << " x " << K << ", output " << n << ", " << threshold;
  }
};

TEST(SpqtBaselines, EqualTheReference) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    for (const auto& [N, K] : {std::pair{int64_t{1}, int64_t{256}}, {200, 768}, {256, 256}, {700, 1024}}) {
      const Case rows(layout::Id::q4_K, N, K, pool), zigzag(layout::Id::zz4_k, N, K, pool);
      SkippingRows b1(rows.weight, pool);
      UnbalancedZigzag b2(zigzag.weight, pool);
      for (const float threshold : {0.0f, 0.75f, 2.5f, kNothing, 0.75f}) {
        rows.check(b1, threshold);
        zigzag.check(b2, threshold);
      }
    }
  }
}

TEST(SpqtBaselines, AnyNumberOfInputs) {  // zigzag columns need no multiple of 256
  ThreadPool pool(2);
  for (const int64_t K : {1, 2, 17, 31, 33, 333}) {
    const Case zigzag(layout::Id::zz4_k, 300, K, pool);
    UnbalancedZigzag b2(zigzag.weight, pool);
    for (const float threshold : {0.0f, 0.75f}) zigzag.check(b2, threshold);
  }
}

TEST(SpqtBaselines, SkippedInputsAreNotReadAndNanIsActive) {
  ThreadPool pool(2);
  Case rows(layout::Id::q4_K, 256, 512, pool), zigzag(layout::Id::zz4_k, 256, 512, pool);
  SkippingRows b1(rows.weight, pool);
  UnbalancedZigzag b2(zigzag.weight, pool);
  std::vector<float> y(256, NAN);
  for (const float quiet : {0.0f, 0.5f}) {
    rows.x.assign(512, quiet);
    b1.run(rows.x.data(), 1, y.data());
    EXPECT_THAT(y, testing::Each(0.0f));
    b2.run(rows.x.data(), 1, y.data());
    EXPECT_THAT(y, testing::Each(0.0f));
  }
  rows.x[300] = NAN;
  b1.run(rows.x.data(), 1, y.data());
  EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float v) { return std::isnan(v); }));
  b2.run(rows.x.data(), 1, y.data());
  EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float v) { return std::isnan(v); }));
}

TEST(SpqtBaselines, RefuseOtherLayouts) {
  ThreadPool pool(1);
  const Case q6(layout::Id::q6_K, 256, 256, pool), tiled(layout::Id::zz4_k, 1024, 256, pool, {.tile_rows = 256});
  EXPECT_THAT(([&] { SkippingRows(q6.weight, pool); }), ThrowsMessage<Error>(HasSubstr("B1 is for q4_K")));
  EXPECT_THAT(([&] { UnbalancedZigzag(q6.weight, pool); }), ThrowsMessage<Error>(HasSubstr("B2 is for zigzag")));
  EXPECT_THAT(([&] { UnbalancedZigzag(tiled.weight, pool); }), ThrowsMessage<Error>(HasSubstr("whole columns")));
}

}  // namespace
}  // namespace lacuna::eval
