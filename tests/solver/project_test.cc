#include "solver/project.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/scalar.h"
#include "problems.h"

namespace lacuna::solver {
namespace {

using test::group_pattern;
using test::matrix;
using test::n_m_pattern;
using test::random_weights;
using test::row_pattern;
using test::unstructured_pattern;

bool same(const at::Tensor& keep, const std::vector<float>& expected) {
  return keep.equal(matrix(keep.size(0), keep.size(1), expected).to(at::kBool));
}

TEST(FloorShare, IsExactWhereTheProductIsWhole) {
  EXPECT_EQ(floor_share(0.29, 100), 29);  // 0.29 * 100 is 28.999...96 in double
  EXPECT_EQ(floor_share(0.7, 10), 7);
  EXPECT_EQ(floor_share(0.5, 7), 3);
  EXPECT_EQ(floor_share(0, 7), 0);
  EXPECT_EQ(floor_share(0.999, 7), 6);
}

TEST(KeepMask, RowDropsTheSmallestOfEveryRow) {
  const at::Tensor score = matrix(2, 4, {4, 1, 3, 2, 0, 9, 8, 7});
  EXPECT_TRUE(same(keep_mask(score, row_pattern(0.5)), {1, 0, 1, 0, 0, 1, 1, 0}));
  EXPECT_TRUE(same(keep_mask(score, row_pattern(0.49)), {1, 0, 1, 1, 0, 1, 1, 1}));
}

TEST(KeepMask, OfEqualScoresTheLowerIndexStays) {
  const at::Tensor ones = at::ones({2, 5}, at::kFloat);
  EXPECT_TRUE(same(keep_mask(ones, row_pattern(0.4)), {1, 1, 1, 0, 0, 1, 1, 1, 0, 0}));
  EXPECT_TRUE(same(keep_mask(ones, unstructured_pattern(0.4)), {1, 1, 1, 1, 1, 1, 0, 0, 0, 0}));
  EXPECT_TRUE(same(keep_mask(ones, n_m_pattern(1, 3)), {1, 0, 0, 1, 0, 1, 0, 0, 1, 0}));
  EXPECT_TRUE(same(keep_mask(matrix(1, 5, {1, 2, 1, 1, 0}), row_pattern(0.6)), {1, 1, 0, 0, 0}));
  EXPECT_TRUE(same(keep_mask(at::zeros({1, 4}, at::kFloat), row_pattern(0.5)), {1, 1, 0, 0}));
}

TEST(KeepMask, UnstructuredRanksOverTheMatrix) {
  const at::Tensor score = matrix(2, 3, {9, 8, 7, 1, 2, 3});
  EXPECT_TRUE(same(keep_mask(score, unstructured_pattern(0.5)), {1, 1, 1, 0, 0, 0}));
}

TEST(KeepMask, NMKeepsAtMostNOfEveryM) {
  const at::Tensor score = matrix(1, 7, {1, 4, 2, 3, 1, 5, 2});
  EXPECT_TRUE(same(keep_mask(score, n_m_pattern(2, 4)), {0, 1, 0, 1, 0, 1, 1}));
  EXPECT_TRUE(same(keep_mask(score, n_m_pattern(1, 4)), {0, 1, 0, 0, 0, 1, 0}));
  EXPECT_TRUE(keep_mask(score, n_m_pattern(4, 4)).all().item<bool>());
}

TEST(KeepMask, GroupsAreRankedByTheirSumOfSquares) {
  // Group energies, row by row: 4 + 4, 9 (partial); 1 + 1, 16: half of four groups stay.
  const at::Tensor score = matrix(2, 3, {2, 2, 3, 1, 1, 4});
  EXPECT_TRUE(same(keep_mask(score, group_pattern(2, 0.5)), {0, 0, 1, 0, 0, 1}));
  EXPECT_TRUE(same(keep_mask(score, group_pattern(16, 0.5)), {0, 0, 0, 1, 1, 1}));  // a group longer than the row
}

TEST(KeepMask, CountsAreThePatterns) {
  for (const int64_t N : {1, 3, 8}) {
    for (const int64_t K : {1, 2, 17, 64}) {
      const at::Tensor score = random_weights(N, K, 7).abs();
      for (const double s : {0.0, 0.25, 0.5, 0.9, 0.999}) {
        const int64_t per_row = K - int64_t(std::floor(s * double(K) + 1e-6));
        EXPECT_TRUE((keep_mask(score, row_pattern(s)).sum(1) == per_row).all().item<bool>())
            << N << " " << K << " " << s;
        EXPECT_EQ(keep_mask(score, unstructured_pattern(s)).sum().item<int64_t>(),
                  N * K - int64_t(std::floor(s * double(N * K) + 1e-6)));
      }
    }
  }
}

TEST(KeepMask, DoesNotDependOnTheNumberOfThreads) {
  const at::Tensor score = random_weights(301, 300, 5).abs();
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = keep_mask(score, row_pattern(0.5));
  at::set_num_threads(5);
  EXPECT_TRUE(keep_mask(score, row_pattern(0.5)).equal(one));
  at::set_num_threads(threads);
  EXPECT_TRUE((one.sum(1) == 150).all().item<bool>());
}

TEST(Ramped, EndsAtThePattern) {
  EXPECT_DOUBLE_EQ(ramped(row_pattern(0.5), 1).sparsity, 0.5);
  EXPECT_DOUBLE_EQ(ramped(row_pattern(0.5), 0.2).sparsity, 0.1);
  EXPECT_EQ(ramped(n_m_pattern(2, 4), 0).n, 4);
  EXPECT_EQ(ramped(n_m_pattern(2, 4), 0.5).n, 3);
  EXPECT_EQ(ramped(n_m_pattern(2, 4), 1).n, 2);
}

TEST(Grid, IncludesZeroAndRoundsItsScaleToF16) {
  const at::Tensor W = matrix(3, 4, {1, 2, 3, 4, -4, -3, -2, -1, -0.1f, 0.2f, 0.3f, -0.05f});
  const Grid grid{4, 0};
  const Affine affine = fit_grid(W, grid);
  for (int64_t r = 0; r < 3; ++r) {
    const float scale = affine.scale[r][0].item<float>(), zero = affine.zero[r][0].item<float>();
    EXPECT_EQ(to_float(to_f16(scale)), scale);
    EXPECT_EQ(zero, std::nearbyint(zero));
  }
  EXPECT_EQ(affine.scale[0][0].item<float>(), to_float(to_f16(4.0f / 15)));
  EXPECT_EQ(affine.zero[0][0].item<float>(), 0);
  EXPECT_EQ(affine.zero[1][0].item<float>(), 15);
  EXPECT_EQ(affine.zero[2][0].item<float>(), 4);  // 0.1 / (0.4 / 15) = 3.75
}

TEST(Grid, ErrorIsAtMostHalfAStepInsideItsRange) {
  for (const int bits : {1, 2, 3, 4, 8}) {
    for (const int64_t K : {1, 5, 64, 100, 257}) {
      for (const int64_t size : {0, 1, 7, 16, 128, 1000}) {
        const Grid grid{bits, size};
        const at::Tensor W = random_weights(5, K, 3);
        const Rounded rounded = round_to_grid(W, grid, fit_grid(W, grid));
        EXPECT_EQ(rounded.affine.scale.sizes(), (std::vector<int64_t>{5, grid.groups(K)}));
        const std::vector<double> w = test::values(W), q = test::values(decode(rounded, grid)),
                                  s = test::values(rounded.affine.scale);
        const int64_t G = grid.groups(K), g = grid.group(K);
        for (int64_t n = 0; n < 5; ++n) {
          for (int64_t k = 0; k < K; ++k) {
            // Half a step by rounding, half a step more at the ends by the whole zero; f16's relative 2^-11 of the
            // range.
            const double step = s[size_t(n * G + k / g)], codes = double((1 << bits) - 1);
            EXPECT_LE(std::fabs(w[size_t(n * K + k)] - q[size_t(n * K + k)]),
                      step * (1.0 + codes * 0x1p-10) + codes * 0x1p-25)
                << bits << " bits, K " << K << ", group " << size;
          }
        }
      }
    }
  }
}

TEST(Grid, ZeroGroupsDecodeToZero) {
  for (const float value : {0.0f, -0.0f, 1e-30f, -1e-40f}) {
    const at::Tensor W = at::full({2, 6}, value, at::kFloat);
    const Grid grid{4, 4};
    const Rounded rounded = round_to_grid(W, grid, fit_grid(W, grid));
    EXPECT_TRUE(decode(rounded, grid).equal(at::zeros({2, 6}, at::kFloat)));
    EXPECT_TRUE((rounded.affine.scale == 0).all().item<bool>());
    EXPECT_TRUE(rounded.affine.zero.isfinite().all().item<bool>());
  }
}

TEST(Grid, SymmetricOnesHaveOneZeroAndHoldBothEnds) {
  for (const int bits : {2, 3, 4, 8}) {
    const float half = float(1 << (bits - 1));
    const Grid grid{bits, 4, true};
    const at::Tensor W = matrix(3, 4, {-1, 0.25f, 0.5f, 1, 0, 0, 0, 0, -3, -2, -1, -0.5f});
    const Rounded rounded = round_to_grid(W, grid, fit_grid(W, grid));
    EXPECT_TRUE((rounded.affine.zero == half).all().item<bool>());
    const auto scale = [&](int64_t row) { return rounded.affine.scale[row][0].item<float>(); };
    EXPECT_NEAR(scale(0), 1 / (half - 1), 0x1p-11 / (half - 1));
    EXPECT_EQ(scale(1), 0);
    EXPECT_NEAR(scale(2), 3 / half, 3 * 0x1p-11 / half);
    const at::Tensor difference = (decode(rounded, grid) - W).abs();
    for (const int64_t row : {0, 1, 2})  // half a step, and f16's rounding of the scale at the ends
      EXPECT_LE(difference[row].max().item<float>(), scale(row) * (0.5f + half * 0x1p-11f)) << bits;
  }
}

TEST(Grid, RefusesScalesPastF16) {
  const at::Tensor W = matrix(1, 2, {-1e6f, 1e6f});
  EXPECT_THROW(fit_grid(W, Grid{4, 0}), Error);
  EXPECT_NO_THROW(fit_grid(W, Grid{8, 0}));
}

TEST(Grid, LimitNarrowsTheRange) {
  const at::Tensor W = matrix(1, 3, {-1, 0.5f, 8});
  const Affine affine = fit_grid(W, Grid{2, 0}, matrix(1, 1, {2}));
  EXPECT_EQ(affine.scale.item<float>(), 1);
  EXPECT_EQ(affine.zero.item<float>(), 1);
}

TEST(Stored, DroppedWeightsArePlusZeroWithCodeZero) {
  const at::Tensor W = matrix(1, 4, {-1, -2, 3, 4});
  const at::Tensor keep = matrix(1, 4, {0, 1, 0, 1}).to(at::kBool);
  const Grid grid{4, 0};
  const Solution rounded = stored(round_to_grid(W, grid, fit_grid(W, grid)), grid, keep), plain = stored(W, keep);
  for (const Solution& solution : {rounded, plain}) {
    for (const int64_t k : {0, 2}) {
      EXPECT_EQ(solution.weight[0][k].item<float>(), 0);
      EXPECT_FALSE(std::signbit(solution.weight[0][k].item<float>()));
    }
  }
  EXPECT_EQ(rounded.code[0][0].item<int>(), 0);
  EXPECT_EQ(rounded.code.scalar_type(), at::kByte);
  EXPECT_EQ(plain.weight[0][3].item<float>(), 4);
}

}  // namespace
}  // namespace lacuna::solver
