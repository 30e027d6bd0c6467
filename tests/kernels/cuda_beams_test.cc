// tests/kernels/cuda_beams_test.cc - what beams take beside a decoder's ops, against the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "kernels/cuda/beams.h"
#include "kernels/cuda_memory.h"

namespace lacuna {
namespace {

using test::device;
using test::OnDevice;
using test::stream;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

// Every step's table is the one that follows the beams' histories.
TEST(CudaBeams, PlacesFollowTheParents) {
  LACUNA_NEED_DEVICE();
  const int64_t steps = test::emulated() ? 40 : 700, first = 13;
  Rng rng(1);
  const OnDevice<uint32_t> sources(static_cast<size_t>(steps));
  std::vector<std::vector<uint32_t>> slots(4);  // of each beam, [positions]
  for (int64_t s = 0; s < steps; ++s) {
    cuda::BeamStep step;
    step.first = int32_t(first);
    step.position = int32_t(first + s);
    std::vector<std::vector<uint32_t>> next;
    for (uint32_t b = 0; b < 4; ++b) {
      const auto parent = uint32_t(rng.below(4));
      step.parents |= parent << (4 * b);
      next.push_back(slots[parent]);
      next.back().push_back(b);
    }
    slots = next;
    const OnDevice<cuda::BeamStep> there(std::vector<cuda::BeamStep>{step});
    cuda::launch_order_beams(device(), stream(), there.data(), sources.data(), steps);
    const std::vector<uint32_t> got = sources.values();
    for (int64_t i = 0; i < steps; ++i) {
      uint32_t expected = 0xffffffffu;  // not written yet
      if (i <= s) {
        expected = 0;
        for (size_t b = 0; b < 4; ++b) expected |= slots[b][size_t(i)] << (8 * b);
      }
      ASSERT_EQ(got[size_t(i)], expected) << "step " << s << " position " << i;
    }
  }
}

TEST(CudaBeams, LogSumExpIsThatOfDouble) {
  LACUNA_NEED_DEVICE();
  for (const int64_t N : {1, 2, 31, 257, 4096, 4097, 32000, 151936}) {
    if (test::emulated() && N > 5000) continue;
    for (const int64_t M : {1, 3}) {
      OnDevice<std::byte> workspace(size_t(cuda::log_sum_exp_workspace_bytes(M, N)));
      workspace.buffer().fill(0);
      const OnDevice<double> out(static_cast<size_t>(M));
      for (const float scale : {0.0f, 1.0f, 20.0f, 300.0f}) {
        Rng rng(uint64_t(N) + uint64_t(scale));
        std::vector<float> x(size_t(M * N));
        for (float& v : x) v = scale * float(rng.normal()) + 5;
        if (N > 40) x[17] = -kInf;
        const OnDevice<float> x_there(x);
        std::vector<double> before;
        for (int run = 0; run < 2; ++run) {
          cuda::launch_log_sum_exp(device(), stream(), {x_there.data(), M, N, out.data(), workspace.data()});
          const std::vector<double> got = out.values();
          for (int64_t m = 0; m < M; ++m) {
            const float* const row = &x[size_t(m * N)];
            const double top = double(*std::max_element(row, row + N));
            double sum = 0;
            for (int64_t n = 0; n < N; ++n) sum += std::exp(double(row[n]) - top);
            ASSERT_NEAR(got[size_t(m)], top + std::log(sum), 0x1p-18) << "N " << N << " row " << m << " of " << M;
          }
          if (run == 1) {
            EXPECT_EQ(got, before);
          }
          before = got;
        }
      }
    }
  }
}

TEST(CudaBeams, LogSumExpOfWhatIsNotFiniteIsNotFinite) {
  LACUNA_NEED_DEVICE();
  const int64_t N = 5000;
  OnDevice<std::byte> workspace(size_t(cuda::log_sum_exp_workspace_bytes(2, N)));
  workspace.buffer().fill(0);
  const OnDevice<double> out(size_t{2});
  for (const float bad : {kNan, kInf}) {
    for (const size_t at : {size_t{0}, size_t{4999}}) {
      std::vector<float> x(size_t(2 * N), 1.0f);
      x[at] = bad;
      const OnDevice<float> x_there(x);
      cuda::launch_log_sum_exp(device(), stream(), {x_there.data(), 2, N, out.data(), workspace.data()});
      EXPECT_FALSE(std::isfinite(out.values()[0]));
      EXPECT_NEAR(out.values()[1], 1 + std::log(double(N)), 1e-5);
    }
  }
  const OnDevice<float> none(std::vector<float>(size_t(2 * N), -kInf));
  cuda::launch_log_sum_exp(device(), stream(), {none.data(), 2, N, out.data(), workspace.data()});
  EXPECT_FALSE(std::isfinite(out.values()[0]));
}

// Rows are taken one by one: ties, bad values and NaN of one do not reach another.
TEST(CudaBeams, TopKOfSeveralRows) {
  LACUNA_NEED_DEVICE();
  const int64_t M = 3, N = test::emulated() ? 2100 : 32001, k = 8;
  const int64_t bytes = cuda::top_k_workspace_bytes(N, k);
  OnDevice<std::byte> workspace(size_t(M * bytes));
  for (int64_t m = 0; m < M; ++m) workspace.buffer().upload(std::as_bytes(std::span(&cuda::kNoBadValue, 1)), m * bytes);
  const OnDevice<cuda::TopKCandidate> out(size_t(M * (k + 1)));
  Rng rng(3);
  std::vector<float> x(size_t(M * N));
  for (float& v : x) v = float(std::round(rng.normal() * 40));  // ties
  x[size_t(N + 9)] = kNan;
  const OnDevice<float> there(x);
  for (int run = 0; run < 2; ++run) {
    cuda::TopKArgs args;
    args.x = there.data();
    args.M = M;
    args.N = N;
    args.k = int(k);
    args.out = out.data();
    args.workspace = workspace.data();
    cuda::launch_top_k(device(), stream(), args);
    const auto got = out.values();
    for (int64_t m = 0; m < M; ++m) {
      const float* const row = &x[size_t(m * N)];
      std::vector<int32_t> ids;
      for (int64_t n = 0; n < N; ++n)
        if (!std::isnan(row[n])) ids.push_back(int32_t(n));
      std::ranges::stable_sort(ids, [&](int32_t a, int32_t b) { return row[a] > row[b]; });
      const cuda::TopKCandidate* const of_row = &got[size_t(m * (k + 1))];
      for (int64_t i = 0; i < k; ++i) {
        ASSERT_EQ(of_row[i].id, ids[size_t(i)]) << m << ' ' << i;
        ASSERT_EQ(of_row[i].logit, row[ids[size_t(i)]]) << m << ' ' << i;
      }
      EXPECT_EQ(of_row[k].id, m == 1 ? 9 : -1);
    }
  }
}

}  // namespace
}  // namespace lacuna
