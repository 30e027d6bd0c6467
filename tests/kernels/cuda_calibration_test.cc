// The kernels of calibration on a CUDA device, against the host in double precision or, where a result is exact, bit by
// bit.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/rng.h"
#include "kernels/cuda/calibration.h"
#include "kernels/cuda_memory.h"

namespace lacuna {
namespace {

using test::device;
using test::emulated;
using test::OnDevice;
using test::stream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

struct Shape {
  int64_t M, K;
};
std::vector<Shape> shapes() {
  if (emulated()) return {{1, 1}, {3, 257}, {7, 64}};
  return {{1, 1}, {3, 257}, {512, 4096}, {1500, 63}, {70, 11008}};
}

std::vector<float> normal(int64_t count, uint64_t seed, double size = 1) {
  Rng rng(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = float(size * rng.normal());
  return out;
}

class CudaCalibration : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::found_device().device) GTEST_SKIP() << "SKIPPED: " << test::found_device().reason;
  }
};

// silu's exponential is off by 2 + 1.173 |x| units of 2^-23 (CUDA's __expf); a sum, a quotient and a product round once
// more each.
TEST_F(CudaCalibration, GatesRowsThatLieApart) {
  for (const auto& [M, K] : shapes()) {
    const int64_t stride = 2 * K + 5;
    const std::vector<float> both = normal(M * stride, uint64_t(M + K), 3);
    const OnDevice<float> x(both);
    for (const cuda::Gate gate : {cuda::Gate::swiglu, cuda::Gate::relu}) {
      const OnDevice<float> y(size_t(M * K)), preset(size_t{12});
      const bool swiglu = gate == cuda::Gate::swiglu;
      cuda::launch_gate_rows(device(), stream(),
                             {.gate = gate,
                              .x = x.data(),
                              .up = swiglu ? x.data() + K + 1 : nullptr,
                              .stride = stride,
                              .M = M,
                              .K = K,
                              .y = y.data(),
                              .preset = {preset.data(), 8}});
      const std::vector<float> found = y.values(), set = preset.values();
      for (size_t i = 0; i < set.size(); ++i) ASSERT_TRUE(i < 8 ? set[i] == 0 : std::isnan(set[i])) << i;
      for (int64_t m = 0; m < M; ++m)
        for (int64_t k = 0; k < K; ++k) {
          const double g = both[size_t(m * stride + k)], up = both[size_t(m * stride + K + 1 + k)];
          const double expected = swiglu ? g / (1 + std::exp(-g)) * up : std::max(g, 0.0);
          const double bound = swiglu ? (2 + 1.173 * std::abs(g) + 3) * 0x1p-23 * std::abs(expected) : 0;
          ASSERT_NEAR(found[size_t(m * K + k)], expected, bound) << M << " " << K << " at " << m << " " << k;
        }
    }
  }
}

TEST_F(CudaCalibration, CountsEverySizeInItsBin) {
  for (const auto& [M, K] : shapes()) {
    std::vector<float> x = normal(M * K, uint64_t(3 * M + K));
    for (size_t i = 0; i < x.size(); i += 3) x[i] *= 1e-20f;
    x[0] = -0.0f;
    x.back() = -kInf;
    std::vector<float> norms = normal(K, 9);
    for (float& norm : norms) norm = std::abs(norm);
    for (const bool weighted : {false, true}) {
      std::vector<uint32_t> expected(size_t(cuda::kSizeBins), 7);  // counts are added
      for (int64_t i = 0; i < M * K; ++i) {
        const float size = weighted ? std::abs(x[size_t(i)]) * norms[size_t(i % K)] : std::abs(x[size_t(i)]);
        ++expected[(std::bit_cast<uint32_t>(size) & 0x7fffffffu) >> cuda::kSizeShift];
      }
      const OnDevice<float> there(x), norms_there(norms);
      const OnDevice<uint32_t> bins(std::vector<uint32_t>(size_t(cuda::kSizeBins), 7));
      cuda::launch_count_sizes(
          device(), stream(),
          {.x = there.data(), .M = M, .K = K, .norms = weighted ? norms_there.data() : nullptr, .bins = bins.data()});
      ASSERT_EQ(bins.values(), expected) << M << " " << K << " " << weighted;
    }
  }
}

TEST_F(CudaCalibration, FindsTheFirstValueThatIsNotFinite) {
  const auto first = [](const std::vector<float>& x) {
    const OnDevice<float> there(x);
    const OnDevice<uint32_t> at(std::vector<uint32_t>{0xffffffffu});
    cuda::launch_find_non_finite(device(), stream(), there.data(), int64_t(x.size()), at.data());
    return at.values()[0];
  };
  std::vector<float> x = normal(emulated() ? 20000 : 300001, 4);
  x[5] = std::numeric_limits<float>::max();
  x[6] = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(first(x), 0xffffffffu);
  x.back() = kNan;
  EXPECT_EQ(first(x), uint32_t(x.size() - 1));
  x[x.size() / 2] = -kInf;
  EXPECT_EQ(first(x), uint32_t(x.size() / 2));
  x[0] = -kNan;
  EXPECT_EQ(first(x), 0u);
}

// Equality, NaN and infinity stay; the first tokens of a window stay; what goes is +0.
TEST_F(CudaCalibration, MasksWhatIsBelowTheThreshold) {
  for (const auto& [M, K] : shapes()) {
    std::vector<float> x = normal(M * K, uint64_t(5 * M + K));
    std::vector<float> norms = normal(K, 8);
    for (float& norm : norms) norm = std::abs(norm);
    const float t = 0.75f;
    x[0] = -t, x[size_t(M * K / 2)] = kNan, x[size_t(M * K - 1)] = -kInf;
    for (const bool weighted : {false, true}) {
      for (const float threshold : {0.0f, t}) {
        const int64_t first = 5, window = 4, dense = 2;
        std::vector<float> expected = x;
        unsigned long long inactive = 11;  // they are added
        for (int64_t i = 0; i < M * K; ++i) {
          float& v = expected[size_t(i)];
          const float size = weighted ? std::abs(v) * norms[size_t(i % K)] : std::abs(v);
          if ((first + i / K) % window < dense || !(size < threshold)) continue;
          v = 0;
          ++inactive;
        }
        const OnDevice<float> there(x), norms_there(norms), apart(x.size());
        for (const bool in_place : {false, true}) {  // in place last: x is overwritten
          const OnDevice<unsigned long long> count(std::vector<unsigned long long>{11});
          const OnDevice<float>& y = in_place ? there : apart;
          cuda::launch_mask_rows(device(), stream(),
                                 {.x = there.data(),
                                  .M = M,
                                  .K = K,
                                  .t = threshold,
                                  .norms = weighted ? norms_there.data() : nullptr,
                                  .first = first,
                                  .window = window,
                                  .dense = dense,
                                  .y = y.data(),
                                  .inactive = count.data()});
          const std::vector<float> found = y.values();
          for (size_t i = 0; i < found.size(); ++i)
            ASSERT_EQ(std::bit_cast<uint32_t>(found[i]), std::bit_cast<uint32_t>(expected[i]))
                << M << " " << K << " at " << i << " " << weighted << in_place;
          EXPECT_EQ(count.values()[0], inactive);
        }
      }
    }
  }
}

// Terms are exact to 2^-52 of themselves and all of one sign, so that a sum of n is off by less than n 2^-53 of itself.
TEST_F(CudaCalibration, DistancesAreThoseOfDoublePrecision) {
  for (const int64_t count : emulated() ? std::vector<int64_t>{70001} : std::vector<int64_t>{1, 31, 70001, 5000003}) {
    const std::vector<float> a = normal(count, 1, 1e3), b = normal(count, 2);
    long double expected = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      const double d = double(a[i]) - double(b[i]);
      expected += static_cast<long double>(d) * d;
    }
    const OnDevice<float> a_there(a), b_there(b);
    std::vector<std::vector<double>> found;
    for (int run = 0; run < 2; ++run) {
      const OnDevice<double> parts(size_t(cuda::kDistanceParts));
      cuda::launch_squared_distance(device(), stream(), a_there.data(), b_there.data(), count, parts.data());
      found.push_back(parts.values());
    }
    EXPECT_EQ(found[0], found[1]) << "sums in a fixed order";
    double sum = 0;
    for (const double part : found[0]) sum += part;
    EXPECT_NEAR(sum, double(expected), double(count + 2) * 0x1p-53 * double(expected)) << count;
  }
}

}  // namespace
}  // namespace lacuna
