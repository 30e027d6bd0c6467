#include "kernels/active.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "kernels/cpu/active_isa.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

std::vector<int32_t> expected(const std::vector<float>& x, int64_t M, int64_t K, const float* norms, float t) {
  std::vector<int32_t> out;
  for (int64_t k = 0; k < K; ++k) {
    bool active = false;
    for (int64_t m = 0; m < M; ++m) {
      const float size = std::fabs(x[size_t(m * K + k)]);
      active |= !((norms != nullptr ? size * norms[k] : size) < t);
    }
    if (active) out.push_back(int32_t(k));
  }
  return out;
}

constexpr int32_t kUntouched = -7;

std::vector<int32_t> collected(ThreadPool& pool, const std::vector<float>& x, int64_t M, int64_t K, const float* norms,
                               float t) {
  std::vector<int32_t> list(size_t(K) + 1, kUntouched);
  const int64_t count = kernels::collect_active(pool, x.data(), M, K, norms, t, list.data());
  EXPECT_EQ(list[size_t(K)], kUntouched);
  list.resize(size_t(count));
  return list;
}

TEST(CollectActive, ExactForEveryCountAndEdge) {
  ThreadPool pool(3);
  for (int64_t K : {1, 2, 15, 16, 17, 31, 33, 100}) {
    for (int64_t count = 0; count <= K; ++count) {
      std::vector<float> x(size_t(K), 0.5f);
      Rng rng(uint64_t(K * 1000 + count));
      std::vector<int64_t> order(static_cast<size_t>(K));
      for (int64_t i = 0; i < K; ++i) order[size_t(i)] = i;
      for (int64_t i = K - 1; i > 0; --i) std::swap(order[size_t(i)], order[size_t(rng.below(uint64_t(i + 1)))]);
      for (int64_t i = 0; i < count; ++i) x[size_t(order[size_t(i)])] = i % 2 == 0 ? 1.0f : -1.5f;
      const auto list = collected(pool, x, 1, K, nullptr, 1.0f);
      ASSERT_EQ(int64_t(list.size()), count);
      ASSERT_EQ(list, expected(x, 1, K, nullptr, 1.0f)) << K << " " << count;
    }
  }
}

TEST(CollectActive, SharedOutAmongWorkersGivesTheSameList) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t K : {16383, 16384, 28672, 100003}) {
      for (const int64_t M : {1, 3}) {
        Rng rng(7);
        std::vector<float> x(size_t(M * K)), norms(static_cast<size_t>(K));
        for (float& value : x) value = float(rng.normal());
        for (float& norm : norms) norm = float(1 + rng.uniform());
        for (const float t : {0.0f, 0.7f, 100.0f}) {
          ASSERT_EQ(collected(pool, x, M, K, nullptr, t), expected(x, M, K, nullptr, t)) << threads << " " << K;
          ASSERT_EQ(collected(pool, x, M, K, norms.data(), t), expected(x, M, K, norms.data(), t));
        }
      }
    }
  }
}

TEST(CollectActive, EqualityAndNonFiniteValuesAreActiveOnEveryInstructionSet) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  std::vector<float> x(37, 0.25f);
  x[0] = nan, x[1] = inf, x[2] = -inf, x[3] = 1, x[4] = -1, x[5] = std::nextafter(1.0f, 0.0f), x[20] = nan, x[36] = 1;
  const std::vector<int32_t> wanted = {0, 1, 2, 3, 4, 20, 36};
  for (const cpu::Isa isa : test::isas()) {
    const cpu::ActiveArgs args{x.data(), 1, 37, nullptr, 1.0f, 0, 37};
    std::vector<int32_t> list(37, kUntouched);
    EXPECT_EQ(LACUNA_CPU_SELECT_FOR(isa, count_active)(args), int64_t(wanted.size())) << cpu::isa_name(isa);
    EXPECT_EQ(LACUNA_CPU_SELECT_FOR(isa, write_active)(args, list.data()), int64_t(wanted.size()));
    EXPECT_EQ(list[wanted.size()], kUntouched) << "writes past its indices";
    list.resize(wanted.size());
    EXPECT_EQ(list, wanted) << cpu::isa_name(isa);
  }
}

TEST(CollectActiveGroups, WholeGroupsByTheRootOfTheirMeanSquare) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Groups of four: sizes 1, 0.5, NaN, and sqrt(2) of the short last one; one whose products with the norms count.
  const std::vector<float> x = {2, 0, 0, 0, 1, 0, 0, 0, 0, nan, 0, 0, 1, -1.5f, 0, 0, 2, 0};
  const auto collected = [&](const std::vector<float>& rows, int64_t M, const float* norms, float t) {
    std::vector<int32_t> list(rows.size(), kUntouched);
    list.resize(
        size_t(kernels::collect_active_groups(rows.data(), M, int64_t(rows.size()) / M, norms, t, 4, list.data())));
    return list;
  };
  EXPECT_EQ(collected(x, 1, nullptr, 1), (std::vector<int32_t>{0, 1, 2, 3, 8, 9, 10, 11, 16, 17}));
  EXPECT_EQ(collected(x, 1, nullptr, 0).size(), x.size()) << "t = 0 leaves nothing out";
  std::vector<float> norms(x.size(), 1.0f);
  norms[4] = 2;
  EXPECT_EQ(collected(x, 1, norms.data(), 1), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16, 17}));
  // Two tokens: what either needs.
  EXPECT_EQ(collected({2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2}, 2, nullptr, 1),
            (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

}  // namespace
}  // namespace lacuna
