// tests/kernels/group_sparse_test.cc - what only the gs kernels promise: uneven rows shared out evenly, the same bits
// for every number of threads and every run.
#include "kernels/cpu/group_sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/rng.h"
#include "core/scalar.h"
#include "grouped_weights.h"
#include "kernels/cpu/linear_kernel.h"
#include "kernels/linear.h"
#include "kernels/support.h"

namespace lacuna {
namespace {

using kernels::Output;
using kernels::Prepare;
using kernels::WeightView;
using layout::Id;

/// Row n keeps about n / N of its groups, the last ones all of them.
struct Uneven {
  layout::Shape shape;
  layout::Params params;
  std::vector<std::byte> bytes;
  std::vector<float> decoded, largest;  // [N, K]; largest: |scale| * (largest code + zero)
  const layout::Layout* layout;
};

Uneven uneven(Id id, int64_t N, int64_t K, int64_t g, uint64_t seed) {
  Uneven out{{N, K}, {}, {}, {}, {}, &layout::get(id)};
  Rng rng(seed);
  const int64_t groups = layout::group_count(K, g), levels = int64_t{1} << out.layout->bits;
  std::vector<uint8_t> code(size_t(N * K)), keep(code.size());
  std::vector<float> scale(size_t(N * groups)), zero(scale.size());
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t i = 0; i < groups; ++i) {
      const auto at = size_t(n * groups + i);
      const bool kept = n >= N - 2 || int64_t(rng.below(uint64_t(N))) < n;
      scale[at] = to_float(to_f16(float(rng.normal() * 0.01)));
      zero[at] = float(rng.below(uint64_t(levels)));
      for (int64_t k = i * g; k < std::min(K, (i + 1) * g); ++k) {
        keep[size_t(n * K + k)] = kept;
        code[size_t(n * K + k)] = uint8_t(rng.below(uint64_t(levels)));
        out.largest.push_back(kept ? std::abs(scale[at]) * (float(levels - 1) + zero[at]) : 0);
      }
    }
  }
  out.params = layout::pack_grouped(*out.layout, out.shape, {.group_size = g}, {code, scale, zero, keep}, out.bytes);
  out.decoded.resize(code.size());
  layout::decode_rows(*out.layout, out.shape, out.bytes, 0, N, out.decoded.data(), out.params);
  return out;
}

WeightView view_of(const Uneven& w) { return {"w", w.layout, w.shape, w.bytes, {}, w.params}; }

std::vector<float> run(kernels::LinearGroup& group, const std::vector<float>& x, int64_t M, layout::Shape shape) {
  std::vector<float> y(size_t(M * shape.N), NAN);
  const Output out{y.data(), shape.N};
  group.run({x.data(), M, shape.K}, {&out, 1});
  return y;
}

class GroupSparseKernels : public testing::TestWithParam<cpu::Isa> {};

TEST_P(GroupSparseKernels, UnevenRowsMatchDouble) {
  for (const Id id : {Id::gs2, Id::gs3, Id::gs4, Id::gs8}) {
    for (const int64_t g : {8, 16, 32, 64, 128}) {
      for (const layout::Shape shape : {layout::Shape{37, 672}, {3, 4544}, {130, 96}}) {
        const Uneven w = uneven(id, shape.N, shape.K, g, uint64_t(g));
        const std::vector<float> x = test::random_inputs(1, shape.K, 7);
        const WeightView view = view_of(w);
        const auto group = cpu::make_linear_group(GetParam(), {&view, 1}, test::pool(), Prepare::automatic);
        const std::vector<float> y = run(*group, x, 1, shape);
        std::vector<double> half_step(x.size());
        for (size_t k = 0; k < x.size(); k += 32) {
          float absmax = 0;
          for (size_t i = k; i < k + 32; ++i) absmax = std::max(absmax, std::fabs(x[i]));
          std::fill_n(half_step.begin() + ptrdiff_t(k), 32, 0.5 * double(absmax) / 127 / 254 * (1 + 1e-4));
        }
        for (int64_t n = 0; n < shape.N; ++n) {
          // Rounding the inputs changes at most half a step of each; float sums over the groups round at most K / 8 +
          // 16 times, each time less than the sum of what may pass through.
          double exact = 0, slack = 0, through = 0;
          for (int64_t k = 0; k < shape.K; ++k) {
            const auto at = size_t(n * shape.K + k);
            exact += double(w.decoded[at]) * double(x[size_t(k)]);
            slack += std::fabs(double(w.decoded[at])) * half_step[size_t(k)];
            through += double(w.largest[at]) * std::fabs(double(x[size_t(k)]));
          }
          ASSERT_LE(std::fabs(double(y[size_t(n)]) - exact),
                    slack + 0x1p-23 * double(shape.K / 8 + 16) * through + 1e-30)
              << w.layout->name << " g" << g << " [" << shape.N << ", " << shape.K << "] row " << n;
        }
      }
    }
  }
}

// A token that leaves inputs out: the list says which, whatever x holds there. Groups without an active input are not
// read; sums over the others are those of the token with zeros, but for the order of two roundings.
TEST_P(GroupSparseKernels, InactiveGroupsAreLeftOut) {
  for (const Id id : {Id::gs2, Id::gs3, Id::gs4, Id::gs8}) {
    for (const int64_t g : {8, 16, 32, 64, 128}) {
      for (const layout::Shape shape : {layout::Shape{37, 672}, {261, 1056}}) {
        const Uneven w = uneven(id, shape.N, shape.K, g, uint64_t(g));
        const WeightView view = view_of(w);
        const auto group = cpu::make_linear_group(GetParam(), {&view, 1}, test::pool(), Prepare::automatic);
        EXPECT_NE(group->explain().find("skips " + std::to_string(g) + " inputs together"), std::string::npos);
        for (const double share : {0.0, 0.4, 0.97, 1.0}) {
          std::vector<float> x = test::random_inputs(1, shape.K, 7), zeros(x.size(), 0.0f);
          std::vector<int32_t> active;
          Rng rng(3);
          for (int64_t k = 0; k < shape.K; k += g) {
            const bool keep = rng.uniform() >= share;
            for (int64_t i = k; i < std::min(shape.K, k + g); ++i) {
              // Some single inputs of an active group are left out too.
              if (keep && (i == k || rng.uniform() < 0.8))
                active.push_back(int32_t(i)), zeros[size_t(i)] = x[size_t(i)];
              else
                x[size_t(i)] = NAN;
            }
          }
          const std::vector<float> expected = run(*group, zeros, 1, shape);
          std::vector<float> y(size_t(shape.N), NAN);
          const Output out{y.data(), shape.N};
          group->run({x.data(), 1, shape.K, active.data(), int64_t(active.size())}, {&out, 1});
          for (int64_t n = 0; n < shape.N; ++n) {
            double through = 0;
            for (int64_t k = 0; k < shape.K; ++k)
              through += double(w.largest[size_t(n * shape.K + k)]) * std::fabs(double(zeros[size_t(k)]));
            ASSERT_NEAR(y[size_t(n)], expected[size_t(n)], 0x1p-23 * double(shape.K / 8 + 16) * through)
                << w.layout->name << " g" << g << " row " << n << " share " << share;
          }
          EXPECT_EQ(run(*group, zeros, 1, shape), expected) << "the list is of that token alone";
        }
      }
    }
  }
}

// RECIPES 23: rows fewer than workers, work that does not divide, and the same bits a thousand times in a row.
TEST_P(GroupSparseKernels, ThreadsAndRepetitionsGiveTheSameBits) {
  for (const layout::Shape shape : {layout::Shape{3, 2080}, {211, 1312}}) {
    const Uneven w = uneven(Id::gs4, shape.N, shape.K, 16, 5);
    const WeightView view = view_of(w);
    const std::vector<float> x = test::random_inputs(3, shape.K, 2);
    ThreadPool one(1);
    const auto alone = cpu::make_linear_group(GetParam(), {&view, 1}, one, Prepare::automatic);
    const std::vector<float> single = run(*alone, x, 1, shape), many = run(*alone, x, 3, shape);
    for (const int threads : {2, 3, 5}) {
      ThreadPool pool(threads);
      const auto group = cpu::make_linear_group(GetParam(), {&view, 1}, pool, Prepare::automatic);
      const int times = threads == 5 ? 1000 : 20;
      for (int i = 0; i < times; ++i) ASSERT_EQ(run(*group, x, 1, shape), single) << threads << " threads, run " << i;
      EXPECT_EQ(run(*group, x, 3, shape), many);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, GroupSparseKernels, testing::ValuesIn(test::isas()),
                         [](const auto& isa) { return std::string(cpu::isa_name(isa.param)); });

// Shares of one token's work are even where rows are not.
TEST(GroupSparseWork, GrowsWithTheKeptGroups) {
  const Uneven w = uneven(Id::gs4, 100, 1024, 16, 1);
  const cpu::Problem problem{Id::gs4, w.shape, Prepare::automatic, w.params, w.bytes};
  EXPECT_EQ(cpu::group_sparse_work(problem, 0), 0);
  const int64_t all = cpu::group_sparse_work(problem, 100), half = cpu::group_sparse_work(problem, 50);
  EXPECT_EQ(all, 8 * w.params.kept_groups + 16 * 100);
  EXPECT_LT(half, all / 3) << "the first half of these rows has about a quarter of the work";
}

}  // namespace
}  // namespace lacuna
