#include "calibrate/second_moment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/rng.h"

namespace lacuna::calibrate {
namespace {

/// Sums of 256 products in float32 round each by 2^-24 of the partial sum at most; the mean is rounded once more.
TEST(SecondMoment, IsThatOfDoublePrecision) {
  constexpr int64_t M = 601, K = 300, kStride = 307;  // more than one block of tokens and of rows
  Rng rng(1);
  std::vector<float> x(size_t(M * kStride), NAN);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k) x[size_t(m * kStride + k)] = float(rng.normal() * (k % 7 == 0 ? 30 : 1));
  ThreadPool pool(2);
  SecondMoment moment(K);
  moment.add(x.data(), kStride, 1, pool);
  moment.add(x.data() + kStride, kStride, M - 1, pool);
  EXPECT_EQ(moment.tokens(), M);
  std::vector<float> row(K), column(K);
  for (int64_t i = 0; i < K; i += 13) {
    moment.row(i, row);
    for (int64_t j = 0; j < K; ++j) {
      double sum = 0, size = 0;
      for (int64_t m = 0; m < M; ++m) {
        const double product = double(x[size_t(m * kStride + i)]) * double(x[size_t(m * kStride + j)]);
        sum += product, size += std::abs(product);
      }
      EXPECT_NEAR(row[size_t(j)], sum / M, 257 * 0x1p-24 * size / M) << i << ' ' << j;
      moment.row(j, column);
      EXPECT_EQ(column[size_t(i)], row[size_t(j)]);
    }
  }
}

TEST(SecondMoment, OfNothingIsZeroAndPastFloatIsRefused) {
  ThreadPool pool(1);
  SecondMoment moment(3);
  std::vector<float> row(3, 1.0f);
  moment.row(1, row);
  EXPECT_EQ(row, std::vector<float>(3, 0.0f));
  const std::vector<float> x = {1, 3e30f, 2};
  moment.add(x.data(), 3, 1, pool);
  EXPECT_THROW(moment.row(1, row), Error);
}

}  // namespace
}  // namespace lacuna::calibrate
