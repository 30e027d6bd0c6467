// tests/kernels/cuda_active_test.cc - the list of active inputs made on a CUDA device.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "kernels/active.h"
#include "kernels/cuda/active.h"
#include "kernels/cuda_support.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

class CudaCollectActive : public test::CudaTest {
 protected:
  std::vector<int32_t> collected(const std::vector<float>& x, const std::vector<float>& norms, float t) {
    constexpr int32_t kUntouched = -7;
    const size_t K = x.size();
    const cuda::Buffer x_there = to_device(x), norms_there = to_device(norms);
    const cuda::Buffer list_there = to_device(std::vector<int32_t>(K + 1, kUntouched));
    const cuda::Buffer count_there = to_device(std::vector<int32_t>{kUntouched});
    cuda::collect_active(device(), stream(), x_there.as<float>(), int64_t(K),
                         norms.empty() ? nullptr : norms_there.as<float>(), t, list_there.as<int32_t>(),
                         count_there.as<int32_t>());
    stream().synchronize();
    std::vector<int32_t> list = to_host<int32_t>(list_there);
    const int32_t count = to_host<int32_t>(count_there)[0];
    EXPECT_TRUE(count >= 0 && size_t(count) <= K);
    for (size_t i = size_t(count); i <= K; ++i) EXPECT_EQ(list[i], kUntouched) << "writes past its indices";
    list.resize(size_t(count));
    return list;
  }
};

TEST_F(CudaCollectActive, IsTheListOfTheCpu) {
  for (const size_t K : {size_t{1}, size_t{2}, size_t{31}, size_t{33}, size_t{1000}, size_t{4096}, size_t{4097},
                         size_t{28672}, size_t{100003}}) {
    Rng rng(K);
    std::vector<float> x(K), norms(K);
    for (float& value : x) value = float(rng.normal());
    for (float& norm : norms) norm = float(1 + rng.uniform());
    for (const float t : {0.0f, 0.7f, 100.0f}) {
      for (const bool weighted : {false, true}) {
        std::vector<int32_t> expected(K);
        expected.resize(size_t(kernels::collect_active(test::pool(), x.data(), 1, int64_t(K),
                                                       weighted ? norms.data() : nullptr, t, expected.data())));
        ASSERT_EQ(collected(x, weighted ? norms : std::vector<float>(), t), expected) << K << " " << t;
      }
    }
  }
}

// The paper's Figure 6 shares out nine active entries.
TEST_F(CudaCollectActive, NineOfSixteen) {
  const std::vector<float> x = {2, 0, -3, 0, 0, 1, 4, 0, 5, 0, -1, 6, 0, 7, 0, 8};
  EXPECT_EQ(collected(x, {}, 0.5f), (std::vector<int32_t>{0, 2, 5, 6, 8, 10, 11, 13, 15}));
}

TEST_F(CudaCollectActive, EqualityAndNonFiniteValuesAreActive) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  std::vector<float> x(37, 0.25f);
  x[0] = nan, x[1] = inf, x[2] = -inf, x[3] = 1, x[4] = -1, x[5] = std::nextafter(1.0f, 0.0f), x[20] = nan, x[36] = 1;
  EXPECT_EQ(collected(x, {}, 1.0f), (std::vector<int32_t>{0, 1, 2, 3, 4, 20, 36}));
  EXPECT_EQ(collected({0.0f, -0.0f}, {}, 0.0f), (std::vector<int32_t>{0, 1}));
}

}  // namespace
}  // namespace lacuna
