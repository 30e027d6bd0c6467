#include "solver/columns.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "core/rng.h"

namespace lacuna::solver {
namespace {

/// A block with random values, what is asked of it, and the same in plain loops and double precision.
struct Case {
  int64_t N, B, first, last;
  bool rounds, drops, descent;
};

struct Block {
  ColumnBlock columns;
  ColumnRule rule;
};

Block make(const Case& c) {
  Rng rng(uint64_t(c.N * 1000 + c.B * 10 + c.first));
  const auto random = [&](int64_t rows, int64_t columns, double size) {
    at::Tensor t = at::empty({rows, columns}, at::kFloat);
    for (int64_t i = 0; i < t.numel(); ++i) t.data_ptr<float>()[i] = float(size * rng.normal());
    return t;
  };
  Block out;
  out.columns.values = random(c.B, c.N, 1);
  // A wider matrix's part: rows further apart than they are long.
  out.columns.factor = random(c.B, c.B + 3, 0.3 / std::sqrt(double(c.B))).narrow(1, 2, c.B);
  out.columns.stored = c.descent ? random(c.B, c.N, 1) : at::zeros({c.B, c.N}, at::kFloat);
  out.columns.left = random(c.B, c.N, 1);
  out.columns.code = at::zeros({c.B, c.N}, at::kFloat);
  if (c.descent) out.columns.inverse = random(1, c.B, 0.5).abs().reshape({c.B}).contiguous();
  if (c.rounds) {
    out.rule.bits = 4;
    out.rule.scale = (random(1, c.N, 0.1).abs() + 0.05).reshape({c.N}).contiguous();
    out.rule.scale[0] = 0;  // a group without weights
    out.rule.step = out.rule.scale.masked_fill(out.rule.scale == 0, 1).contiguous();
    out.rule.zero = (random(1, c.N, 3).abs()).round().clamp(0, 15).reshape({c.N}).contiguous();
  }
  if (c.drops) out.rule.keep = (random(c.B, c.N, 1) > 0).contiguous();
  return out;
}

void expect_fixed(const Case& c, int threads) {
  SCOPED_TRACE(testing::Message() << c.N << " rows, columns " << c.first << " to " << c.last << " of " << c.B
                                  << (c.rounds ? ", rounded" : "") << (c.drops ? ", dropped" : "")
                                  << (c.descent ? ", descent" : "") << ", " << threads << " threads");
  const Block before = make(c), after = make(c);
  const int had = at::get_num_threads();
  at::set_num_threads(threads);
  fix_columns(after.columns, c.first, c.last, after.rule);
  at::set_num_threads(had);
  const auto at_of = [&](const at::Tensor& t, int64_t k, int64_t n) {
    return double(t.data_ptr<float>()[k * c.N + n]);
  };
  const auto factor = [&](int64_t k, int64_t j) {
    return double(before.columns.factor.data_ptr<float>()[k * (c.B + 3) + j]);
  };
  for (int64_t n = 0; n < c.N; ++n) {
    std::vector<double> left(size_t(c.B));
    for (int64_t j = 0; j < c.B; ++j) {
      if (j < c.first) {  // fixed before: nothing of them changes
        ASSERT_EQ(at_of(after.columns.stored, j, n), at_of(before.columns.stored, j, n));
        ASSERT_EQ(at_of(after.columns.left, j, n), at_of(before.columns.left, j, n));
        continue;
      }
      double value = at_of(before.columns.values, j, n), size = std::fabs(value);
      for (int64_t k = c.first; k < std::min(j, c.last); ++k) {
        value -= factor(k, j) * left[size_t(k)];
        size += std::fabs(factor(k, j) * left[size_t(k)]);
      }
      const double rounding = size * 0x1p-24 * double(c.B + 4);
      if (j >= c.last) {
        ASSERT_NEAR(at_of(after.columns.values, j, n), value, rounding) << "column " << j << ", row " << n;
        continue;
      }
      const double old = at_of(before.columns.stored, j, n);
      double wanted = value, error = rounding + 1e-7 * std::fabs(value);
      if (c.descent) {
        const double inverse = before.columns.inverse.data_ptr<float>()[j];
        wanted = old + value * inverse;
        error = error * inverse + 1e-7 * (std::fabs(old) + std::fabs(value * inverse));
      }
      const double stored = at_of(after.columns.stored, j, n);
      const bool kept = !c.drops || before.rule.keep.data_ptr<bool>()[j * c.N + n];
      if (!kept) {
        ASSERT_EQ(stored, 0);
        ASSERT_FALSE(std::signbit(stored));
      } else if (!c.rounds) {
        ASSERT_NEAR(stored, wanted, error) << "column " << j << ", row " << n;
      } else {
        const double scale = before.rule.scale.data_ptr<float>()[n], step = before.rule.step.data_ptr<float>()[n],
                     zero = before.rule.zero.data_ptr<float>()[n], code = at_of(after.columns.code, j, n);
        ASSERT_EQ(code, std::clamp(std::nearbyint(code), 0.0, 15.0));
        const double exact = std::clamp(wanted / step + zero, 0.0, 15.0);
        ASSERT_LE(std::fabs(code - exact), 0.5 + error / step + 1e-5) << "column " << j << ", row " << n;
        ASSERT_NEAR(stored, (code - zero) * scale, 1e-6 * std::fabs(stored));
      }
      // What is left is of the stored values, so that the reference follows the same codes.
      left[size_t(j)] = c.descent ? stored - old : wanted - stored;
      ASSERT_NEAR(at_of(after.columns.left, j, n), left[size_t(j)], error + 1e-7 * std::fabs(stored));
      left[size_t(j)] = at_of(after.columns.left, j, n);
    }
  }
}

TEST(Columns, EqualPlainLoops) {
  for (const int64_t N : {1, 63, 64, 65, 130, 700})
    for (const auto& [B, first, last] : std::vector<std::array<int64_t, 3>>{
             {1, 0, 1}, {5, 0, 5}, {5, 2, 4}, {128, 0, 128}, {128, 64, 96}, {384, 0, 384}})
      for (const bool rounds : {false, true})
        for (const bool drops : {false, true})
          for (const bool descent : {false, true}) {
            expect_fixed({N, B, first, last, rounds, drops, descent}, N % 2 ? 1 : 3);
            if (HasFatalFailure()) return;
          }
}

TEST(Columns, TheSameBitsForAnyNumberOfThreads) {
  const Case c{1000, 96, 0, 64, true, true, false};
  std::vector<Block> blocks;
  const int had = at::get_num_threads();
  for (const int threads : {1, 2, 5}) {
    at::set_num_threads(threads);
    blocks.push_back(make(c));
    fix_columns(blocks.back().columns, c.first, c.last, blocks.back().rule);
  }
  at::set_num_threads(had);
  for (const Block& block : blocks) {
    EXPECT_TRUE(block.columns.stored.equal(blocks[0].columns.stored));
    EXPECT_TRUE(block.columns.values.equal(blocks[0].columns.values));
    EXPECT_TRUE(block.columns.left.equal(blocks[0].columns.left));
  }
}

}  // namespace
}  // namespace lacuna::solver
