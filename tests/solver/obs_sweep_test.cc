#include "solver/obs_sweep.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include "core/scalar.h"
#include "problems.h"

namespace lacuna::solver {
namespace {

using test::lost;
using test::values;

// The textbook in plain loops and double precision: the inverse by Gauss-Jordan, one column eliminated at a time with
// the whole inverse updated (Optimal Brain Surgeon), no Cholesky factor and no lazy blocks.
class Textbook {
 public:
  explicit Textbook(const Problem& problem)
      : N_(problem.W.size(0)), K_(problem.W.size(1)), problem_(problem), w_(values(problem.W)) {
    std::vector<double> H = values(problem.stats.second_moment);
    double mean = 0;
    for (int64_t k = 0; k < K_; ++k) mean += H[size_t(k * K_ + k)] / double(K_);
    for (int64_t k = 0; k < K_; ++k) H[size_t(k * K_ + k)] += problem.options.damping * mean;
    inverse_ = inverse(H);
    std::vector<double> left = inverse_;
    for (int64_t k = 0; k < K_; ++k) {
      pivot_.push_back(left[size_t(k * K_ + k)]);
      eliminate(left, k);
    }
  }

  struct Answer {
    std::vector<double> weight, code;
    std::vector<bool> keep;
  };

  /// Masks chosen for `unit` columns at a time over all rows (per row where `per_row`), n of m where m > 0.
  Answer run(int64_t unit, bool per_row, int64_t n, int64_t m, double sparsity) {
    Answer answer{std::vector<double>(w_.size()), std::vector<double>(w_.size()), std::vector<bool>(w_.size(), true)};
    const int bits = problem_.grid.bits;
    const int64_t size = problem_.grid.group(K_);
    std::vector<float> scale(static_cast<size_t>(N_)), zero(static_cast<size_t>(N_));
    std::vector<double> left = inverse_;
    for (int64_t k = 0; k < K_; ++k) {
      if (m > 0 && k % m == 0) choose(answer.keep, k, std::min(k + m, K_), true, std::min(m, K_ - k) - n);
      if (m == 0 && sparsity > 0 && k % unit == 0) {
        const int64_t end = std::min(k + unit, K_), rows = per_row ? 1 : N_;
        const auto total = [&](int64_t column) { return int64_t(std::floor(sparsity * double(rows * column) + 1e-6)); };
        choose(answer.keep, k, end, per_row, total(end) - total(k));
      }
      if (bits > 0 && k % size == 0) {
        for (int64_t r = 0; r < N_; ++r) {
          double low = 0, high = 0;
          for (int64_t j = k; j < std::min(k + size, K_); ++j) {
            if (!answer.keep[at(r, j)]) continue;
            low = std::min(low, w_[at(r, j)]), high = std::max(high, w_[at(r, j)]);
          }
          scale[size_t(r)] = to_float(to_f16(float((high - low) / ((1 << bits) - 1))));
          zero[size_t(r)] = float(std::clamp(std::nearbyint(-low / scale[size_t(r)]), 0.0, double((1 << bits) - 1)));
        }
      }
      for (int64_t r = 0; r < N_; ++r) {
        double q = w_[at(r, k)];
        if (bits > 0) {
          const double s = scale[size_t(r)], z = zero[size_t(r)];
          const double code = std::clamp(std::nearbyint(q / s) + z, 0.0, double((1 << bits) - 1));
          answer.code[at(r, k)] = code;
          q = s * (code - z);
        }
        if (!answer.keep[at(r, k)]) q = answer.code[at(r, k)] = 0;
        answer.weight[at(r, k)] = q;
        const double error = (w_[at(r, k)] - q) / left[size_t(k * K_ + k)];
        for (int64_t j = k; j < K_; ++j) w_[at(r, j)] -= error * left[size_t(k * K_ + j)];
      }
      eliminate(left, k);
    }
    return answer;
  }

 private:
  size_t at(int64_t r, int64_t k) const { return size_t(r * K_ + k); }

  std::vector<double> inverse(std::vector<double> a) const {
    std::vector<double> b(a.size(), 0);
    for (int64_t i = 0; i < K_; ++i) b[size_t(i * K_ + i)] = 1;
    for (int64_t c = 0; c < K_; ++c) {
      const double pivot = a[size_t(c * K_ + c)];
      for (int64_t j = 0; j < K_; ++j) a[size_t(c * K_ + j)] /= pivot, b[size_t(c * K_ + j)] /= pivot;
      for (int64_t r = 0; r < K_; ++r) {
        const double factor = a[size_t(r * K_ + c)];
        if (r == c || factor == 0) continue;
        for (int64_t j = 0; j < K_; ++j) {
          a[size_t(r * K_ + j)] -= factor * a[size_t(c * K_ + j)];
          b[size_t(r * K_ + j)] -= factor * b[size_t(c * K_ + j)];
        }
      }
    }
    return b;
  }

  void eliminate(std::vector<double>& a, int64_t k) const {
    const double pivot = a[size_t(k * K_ + k)];
    for (int64_t i = k + 1; i < K_; ++i) {
      const double factor = a[size_t(i * K_ + k)] / pivot;
      for (int64_t j = k; j < K_; ++j) a[size_t(i * K_ + j)] -= factor * a[size_t(k * K_ + j)];
    }
  }

  void choose(std::vector<bool>& keep, int64_t first, int64_t end, bool per_row, int64_t dropped) const {
    std::vector<std::tuple<double, int64_t, int64_t>> scores;
    const auto drop = [&] {
      std::stable_sort(scores.begin(), scores.end());
      for (int64_t i = 0; i < dropped; ++i)
        keep[at(std::get<1>(scores[size_t(i)]), std::get<2>(scores[size_t(i)]))] = false;
      scores.clear();
    };
    for (int64_t r = 0; r < N_; ++r) {
      for (int64_t k = first; k < end; ++k) {
        scores.emplace_back(w_[at(r, k)] * w_[at(r, k)] / pivot_[size_t(k)], r, k);
      }
      if (per_row) drop();
    }
    if (!per_row) drop();
  }

  int64_t N_, K_;
  const Problem& problem_;
  std::vector<double> w_, inverse_, pivot_;
};

void expect_equal(const Solution& solution, const Textbook::Answer& answer, bool codes) {
  const std::vector<double> weight = values(solution.weight);
  double largest = 0, norm = 0;
  for (size_t i = 0; i < weight.size(); ++i) {
    largest = std::max(largest, std::fabs(weight[i] - answer.weight[i]));
    norm = std::max(norm, std::fabs(answer.weight[i]));
  }
  // Float sweeps of K <= 200 columns: about K eps of the largest weight. Scales are f16: where a float sum's last bit
  // differs, one may round to its neighbour, up to 2^-10 of it. A differing code or mask is far above.
  EXPECT_LE(largest, 0x1p-10 * norm);
  if (codes) {
    const std::vector<double> code = values(solution.code);
    EXPECT_EQ(code, answer.code);
  }
}

TEST(BlockEnd, NeverCutsAUnitThatStartsInside) {
  const int64_t none[] = {1}, even[] = {32}, large[] = {200}, mixed[] = {48, 4}, odd[] = {130, 4};
  EXPECT_EQ(block_end(0, 300, 128, none), 128);
  EXPECT_EQ(block_end(256, 300, 128, none), 300);
  EXPECT_EQ(block_end(0, 300, 128, even), 128);
  EXPECT_EQ(block_end(0, 600, 128, large), 128);
  EXPECT_EQ(block_end(128, 600, 128, large), 200);
  EXPECT_EQ(block_end(0, 600, 128, mixed), 96);
  EXPECT_EQ(block_end(128, 600, 128, odd), 130);
  EXPECT_EQ(block_end(0, 1, 128, odd), 1);
  for (int64_t a = 1; a < 60; a += 7) {
    for (int64_t b = 1; b < 60; b += 5) {
      const int64_t units[] = {a, b};
      for (int64_t first = 0; first < 150;) {
        const int64_t end = block_end(first, 150, 32, units);
        ASSERT_GT(end, first);
        for (const int64_t unit : units) {
          for (int64_t start = 0; start < end; start += unit) {
            ASSERT_FALSE(start > first && std::min<int64_t>(start + unit, 150) > end) << a << " " << b << " " << first;
          }
        }
        first = end;
      }
    }
  }
}

TEST(Gptq, EqualsTheTextbook) {
  for (const auto& [N, K, group, block] : {std::tuple{5, 24, 8, 128},
                                           {3, 40, 0, 16},
                                           {4, 200, 32, 128},
                                           {4, 150, 48, 32},
                                           {1, 17, 128, 4},
                                           {6, 1, 128, 128}}) {
    for (const int bits : {2, 3, 4, 8}) {
      Problem problem = test::random_problem(N, K, uint64_t(N * 1000 + K + bits));
      problem.grid = {bits, group};
      problem.options.block = block;
      SCOPED_TRACE(testing::Message() << N << " x " << K << ", " << bits << " bits, group " << group << ", block "
                                      << block);
      expect_equal(solve("gptq", problem), Textbook(problem).run(1, false, 0, 0, 0), true);
    }
  }
}

TEST(SparseGpt, EqualsTheTextbook) {
  for (const auto& [N, K, block] : {std::tuple{5, 24, 8}, {3, 40, 128}, {4, 200, 128}, {1, 17, 5}, {6, 1, 128}}) {
    for (const double sparsity : {0.0, 0.3, 0.5, 0.9}) {
      SCOPED_TRACE(testing::Message() << N << " x " << K << ", " << sparsity << ", block " << block);
      Problem problem = test::random_problem(N, K, uint64_t(N * 1000 + K));
      problem.options.block = block;
      problem.pattern = test::unstructured_pattern(sparsity);
      expect_equal(solve("sparsegpt", problem), Textbook(problem).run(block, false, 0, 0, sparsity), false);
      problem.pattern = test::row_pattern(sparsity);
      expect_equal(solve("sparsegpt", problem), Textbook(problem).run(block, true, 0, 0, sparsity), false);
    }
  }
}

TEST(SparseGpt, NMEqualsTheTextbook) {
  for (const auto& [n, m] : {std::pair{2, 4}, {1, 4}, {4, 8}, {2, 3}}) {
    Problem problem = test::random_problem(4, 50, uint64_t(n * 10 + m));
    problem.pattern = test::n_m_pattern(n, m);
    problem.options.block = 16;
    SCOPED_TRACE(testing::Message() << n << ":" << m);
    expect_equal(solve("sparsegpt", problem), Textbook(problem).run(0, false, n, m, 0), false);
  }
}

TEST(SparseGpt, RoundsInTheSameSweep) {
  for (const int64_t group : {16, 64}) {
    Problem problem = test::random_problem(4, 128, 11);
    problem.pattern = test::unstructured_pattern(0.5);
    problem.grid = {4, group};
    problem.options.block = 64;
    expect_equal(solve("sparsegpt", problem), Textbook(problem).run(64, false, 0, 0, 0.5), true);
  }
}

TEST(SparseGpt, PatternsHaveTheirCounts) {
  Problem problem = test::random_problem(6, 300, 5);
  problem.pattern = test::row_pattern(0.37);
  EXPECT_TRUE((solve("sparsegpt", problem).keep.sum(1) == 300 - 111).all().item<bool>());
  problem.pattern = test::unstructured_pattern(0.37);
  EXPECT_EQ(solve("sparsegpt", problem).keep.sum().item<int64_t>(), 1800 - 666);
  problem.pattern = test::group_pattern(16, 0.5);
  const at::Tensor keep = solve("sparsegpt", problem).keep;
  EXPECT_EQ(grouped(keep.to(at::kFloat), 16).amax({2}).sum().item<int64_t>(), 6 * 19 - 57);
  for (int64_t first = 0; first < 300; first += 16) {  // whole groups
    const at::Tensor group = keep.narrow(1, first, std::min<int64_t>(16, 300 - first));
    EXPECT_TRUE((group.all(1) == group.any(1)).all().item<bool>());
  }
}

TEST(ObsSweep, BlocksDoNotChangeTheAnswer) {
  Problem problem = test::random_problem(8, 96, 21);
  problem.grid = {3, 32};
  const Solution whole = solve("gptq", problem);
  for (const int64_t block : {1, 5, 32, 64}) {
    problem.options.block = block;
    EXPECT_TRUE(solve("gptq", problem).code.equal(whole.code)) << block;
  }
}

}  // namespace
}  // namespace lacuna::solver
